"""The bank on CUDA: kernels in half precision, folded, in graphs, and weights that arrive on a side stream."""

import threading
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


MIXES = (
    COUNTS, {"dogs": 1, "pets": 1}, {"food": 3}, {"cats": 1, "cars": 1, "pets": 2}, {"dogs": 1, "pets": 1}, COUNTS,
)  # fmt: skip


@pytest.mark.parametrize("graphs", [False, True], ids=["fused", "graph"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_is_as_close_as_plain(five: Any, tools: Any, dtype: torch.dtype, graphs: bool) -> None:
    lab, packs = five
    plain = lab.bank(packs, device="cuda", dtype=dtype, fused=False)
    bank = lab.bank(packs, device="cuda", dtype=dtype, fused=True, graphs=graphs)
    models = {name: lab.alone(path) for name, path in packs.items()}
    kept: list[tuple[Any, Any, Any]] = []
    for seed, counts in enumerate(MIXES):  # a graph's second mix is a replay with other tasks, and later ones too
        images = tools.random_batch(bank, counts, seed)
        kept.append((images, bank(images), plain(images)))
    for images, found, other in kept:
        for name, x in images.items():
            assert found[name].dtype == dtype and found[name].shape == (len(x), len(bank.tasks[name].classes))
            if len(x):
                wanted = models[name](x)
                error, allowed = ((y[name].cpu().double() - wanted).norm() / wanted.norm() for y in (found, other))
                assert error <= max(2 * allowed, torch.finfo(dtype).eps)
    if graphs:
        assert bank._graphs is not None and 0 < len(bank._graphs) < len(MIXES)


OTHERS: dict[str, dict[str, Any]] = {
    "map": {"global_pool": "map", "class_token": False, "qk_norm": True},
    "avg": {"global_pool": "avg", "class_token": False, "qk_norm": True},
    "DINOv3": {"model": "vit_small_patch16_dinov3"}, "EVA-02": {"model": "eva02_base_patch14_224"},
    "RoPE-mixed": {"model": "vit_small_patch16_rope_mixed_224"},
    "Sapiens2": {"model": "vit_base_patch16_sapiens2", "num_kv_heads": (2, 1)},
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_other_ends_and_blocks_in_a_graph(make_lab: Any, tools: Any, case: str) -> None:
    lab = make_lab(**OTHERS[case])
    packs = {"a": lab.pack("a", seed=1), "b": lab.pack("b", seed=2, size=48, classes=20)}
    plain = lab.bank(packs, device="cuda", dtype=torch.bfloat16, fused=False)
    bank = lab.bank(packs, device="cuda", dtype=torch.bfloat16, fused=True, graphs=True)
    for counts in ({"a": 2, "b": 1}, {"b": 2, "a": 1}):
        images = tools.random_batch(bank, counts)
        found, other = bank(images), plain(images)
        for name, x in images.items():
            wanted = lab.alone(packs[name])(x)
            error, allowed = ((y[name].cpu().double() - wanted).norm() / wanted.norm() for y in (found, other))
            assert error <= max(2 * allowed, 0.01)


def test_graphs_beside_paging_changes_and_streams(five: Any, tools: Any) -> None:
    lab, packs = five
    whole = lab.bank(packs, device="cuda", dtype=torch.bfloat16, fused=True)
    limit = whole.memory().device_bytes - 2 * whole._store.unit
    bank = lab.bank(packs, device="cuda", dtype=torch.bfloat16, fused=True, graphs=True, max_gpu_bytes=limit)
    images = tools.random_batch(bank, dict.fromkeys(COUNTS, 2))
    names = list(images)
    for i in range(40):
        pair = {n: images[n].cuda() for n in (names[i // 2 % 5], names[(i // 2 * 3 + 1) % 5])}
        with torch.cuda.stream(torch.cuda.Stream()):  # other streams take turns with each other
            found, wanted = bank(pair), whole(pair)
            torch.cuda.current_stream().synchronize()
        for name in pair:
            torch.testing.assert_close(found[name], wanted[name], rtol=2e-2, atol=2e-2)
        if i % 10 == 9:  # graphs of the old addresses must not be replayed
            bank.reload("pets")
            whole.reload("pets")
        assert bank.memory().device_bytes <= limit


@pytest.mark.parametrize("budget", [False, True], ids=["all", "paged"])
def test_factors_of_any_rank_and_type_in_graphs(make_lab: Any, tools: Any, budget: bool) -> None:
    lab = make_lab(init_values=0.5)
    packs = {
        "a": lab.factors("a", ranks=(3, 0, 20), seed=1), "b": lab.factors("b", ranks=(1, 2), size=48, seed=2),
        "codes": lab.factors("codes", ranks=(4,), dtype="int8", seed=3), "whole": lab.pack("whole", seed=4),
    }  # fmt: skip
    merged = lab.bank(packs, device="cuda", dtype=torch.bfloat16, fused=False)
    bank = lab.bank(packs, device="cuda", dtype=torch.bfloat16, fused=True, graphs=True)
    if budget:
        limit = bank.memory().device_bytes - bank._store.bytes_of(bank._state.entries["b"].number) // 2
        bank = lab.bank(packs, device="cuda", dtype=torch.bfloat16, fused=True, graphs=True, max_bytes=limit)
    models = {name: lab.alone(path) for name, path in packs.items()}
    for i, mix in enumerate(("a b", "b a", "codes", "codes a", "whole b", "b whole codes", "a b", "codes", "a") * 2):
        counts = dict.fromkeys(mix.split(), 1 + i % 3)
        images = tools.random_batch(bank, counts, i)
        found, other = bank(images), merged(images)
        for name, x in images.items():
            wanted = models[name](x)
            error, allowed = ((y[name].cpu().double() - wanted).norm() / wanted.norm() for y in (found, other))
            assert error <= max(2 * allowed, 0.01), (mix, name)
        assert not budget or bank.memory().device_bytes <= limit
        if i == 8:
            bank.remove("a")
            bank.add("a", packs["a"])
    assert bank._graphs is not None and len(bank._graphs) > 0


def test_threads_share_graphs(five: Any, tools: Any) -> None:
    lab, packs = five
    bank = lab.bank(packs, device="cuda", dtype=torch.bfloat16, fused=True, graphs=True)
    images = {n: x.cuda() for n, x in tools.random_batch(bank, dict.fromkeys(COUNTS, 1)).items()}
    wanted = {n: bank({n: x})[n].clone() for n, x in images.items()}
    torch.cuda.synchronize()
    wrong: list[str] = []

    def call(name: str) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found = bank({name: images[name]})[name]
                torch.cuda.current_stream().synchronize()
                if not torch.allclose(found, wanted[name], rtol=2e-2, atol=2e-2):
                    wrong.append(name)

    threads = [threading.Thread(target=call, args=(name,)) for name in images]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
