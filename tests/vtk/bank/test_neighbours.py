"""Images of NaN, infinite and huge values in a bank's call: their own rows only, in every way that a bank runs."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from vtk.bank import forward as fused
from vtk.bank import fused_calls
from vtk_kernels.norm import norm

CASES: dict[str, dict[str, Any]] = {
    "class token": {}, "mean": {"global_pool": "avg", "reg_tokens": 1}, "qk-norm": {"qk_norm": True},
    "map pooling": {"global_pool": "map", "class_token": False},
}  # fmt: skip
BAD = (math.nan, 1e30)


def untouched(bank: Any, images: dict[str, Tensor], tolerance: float, bad: tuple[float, ...]) -> None:
    """Spoil one image after another; the rows of all others must stay, and its own hold no number but of a huge one."""
    clean = bank(images)
    for value in bad:
        for task, batch in images.items():
            for i in range(len(batch)):
                spoilt = {name: x.clone() for name, x in images.items()}
                spoilt[task][i] = value
                found = bank(spoilt)
                assert math.isfinite(value) or found[task][i].isnan().all()
                for name, rows in found.items():
                    kept = [k for k in range(len(rows)) if (name, k) != (task, i)]
                    assert torch.allclose(rows[kept], clean[name][kept], rtol=0, atol=tolerance), (name, task, i, value)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", [{"fused": False}, {"fused": True}, {"fused": True, "kernels": True}], ids=str)
def test_a_faulty_image_touches_no_row_but_its_own(
    make_lab: Any, tools: Any, case: str, options: dict[str, bool]
) -> None:
    lab = make_lab((tools.CB,), **CASES[case])
    packs = {"a": lab.pack("a", seed=1), "b": lab.pack("b", seed=2, size=48, classes=20),
             "head": lab.pack("head", seed=3, train="head")}  # fmt: skip
    bank = lab.bank(packs, **options)
    untouched(bank, tools.random_batch(bank, {"b": 2, "a": 1, "head": 1}), 1e-12, BAD)


def test_nor_do_the_kernels_mix_rows(make_lab: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not tools.interpreting:
        pytest.skip("kernels run on the card: test_gpu.py")
    lab = make_lab((tools.CB,), embed_dim=16, num_heads=1, depth=1)
    packs = {"a": lab.pack("a", size=16, seed=1), "b": lab.pack("b", size=(16, 8), seed=2)}
    bank = lab.bank(packs, fused=True, kernels=True, dtype=torch.float32)
    images = {name: x.float() for name, x in tools.random_batch(bank, {"a": 1, "b": 1}).items()}
    for name in ("grouped_linear", "packed_attention", "context_broadcast", "add_norm"):
        monkeypatch.setattr(fused, name, partial(getattr(fused, name), use_triton=True))
    monkeypatch.setattr(fused, "normalize", lambda x, spec, kernels: norm(x, spec.eps, use_triton=True)[0])
    monkeypatch.setattr(fused_calls, "patchify", partial(fused_calls.patchify, use_triton=True))
    untouched(bank, images, 1e-6, (math.nan,))
