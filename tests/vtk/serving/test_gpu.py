"""The bank on CUDA: kernels in half precision, and weights that arrive on a side stream."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
COUNTS = {"dogs": 2, "pets": 3, "cars": 1, "food": 2, "cats": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_close_to_fp64(five: Any, tools: Any, dtype: torch.dtype) -> None:
    lab, packs = five
    bank = lab.bank(packs, device="cuda", dtype=dtype)
    images = tools.random_batch(bank, COUNTS)
    bound = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}[dtype]
    for name, logits in bank(images).items():
        wanted = lab.alone(packs[name])(images[name])
        assert logits.dtype == dtype and logits.is_cuda and logits.shape == wanted.shape
        if len(logits):
            assert (logits.cpu().double() - wanted).abs().max() <= bound * wanted.abs().max()


def test_paged_weights_give_the_same_bits(five: Any, tools: Any) -> None:
    lab, packs = five
    whole = lab.bank(packs, device="cuda", dtype=torch.bfloat16)
    limit = whole.memory().device_bytes - 3 * whole._store.unit
    bank = lab.bank(packs, device="cuda", dtype=torch.bfloat16, max_gpu_bytes=limit)
    images = tools.random_batch(bank, dict.fromkeys(COUNTS, 2))
    names = list(images)
    for i in range(40):
        pair = {n: images[n].cuda() for n in (names[i % 5], names[(i * 3 + 1) % 5])}
        with torch.cuda.stream(torch.cuda.Stream()):  # other streams take turns with each other
            found, wanted = bank(pair), whole(pair)
            torch.cuda.current_stream().synchronize()
        for name in pair:
            torch.testing.assert_close(found[name], wanted[name], rtol=2e-2, atol=2e-2)
        assert bank.memory().device_bytes <= limit
