"""The folded bank: kernels it starts, kernels in the interpreter, what it refuses, what it falls back to."""

from functools import partial
from typing import Any

import pytest
import timm
import torch

import vtk.bank.forward as fused
import vtk.bank.fused_calls as fused_calls
from vtk.bank import TaskBank, grouped_weights, launches
from vtk.bank.bank_graphs import BucketGraphs
from vtk.bank.folded import fold
from vtk.bank.layout import Bucket
from vtk.card import Transform
from vtk.errors import UsageError
from vtk.fused.norms import NormSpec
from vtk_kernels.norm import norm


def test_kernels_of_sixteen_tasks_of_one_image(make_lab: Any) -> None:
    lab = make_lab()  # of two blocks
    packs = [lab.pack("few", classes=37), lab.pack("many", classes=196, seed=1)]
    found = {}
    for way in (False, True):
        bank = lab.bank({str(i): packs[i % 2] for i in range(16)}, dtype=torch.bfloat16, kernels=True, fused=way)
        found[way] = launches(bank, {str(i): 1 for i in range(16)})
    assert found[True] == {
        "cat": 2, "patchify": 1, "_to_copy": 1, "mm": 1, "index_select": 4, "add_norm": 1 + 2 * 2,
        "grouped_linear": 2 * 2 + 2, "packed_attention": 2, "linear_gelu": 2, "addmm": 2,
    }  # fmt: skip
    assert found[False].total() == 111
    with pytest.raises(UsageError, match="created with kernels=True; create it so"):
        launches(lab.bank({"0": packs[0]}), {"0": 1})
    # the number of tasks does not matter, the number of widths of classifiers does: one more product each
    more = lab.bank({str(i): packs[0] for i in range(3)}, dtype=torch.bfloat16, kernels=True, fused=True)
    assert launches(more, {"0": 1, "1": 2, "2": 5}).total() == found[True].total() - 2  # no cat of logits either


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_factors_take_four_kernels_a_block_more_whatever_the_tasks(make_lab: Any, dtype: str) -> None:
    lab = make_lab()
    packs = [lab.factors(f"f{r}", ranks=ranks, seed=r, dtype=dtype) for r, ranks in enumerate(((2, 5, 1), (0, 3)))]
    whole = [lab.pack("w0"), lab.pack("w1", seed=1)]

    def count(chosen: list[Any]) -> Any:
        bank = lab.bank({str(i): chosen[i % 2] for i in range(6)}, dtype=torch.bfloat16, kernels=True)
        return launches(bank, {str(i): 1 for i in range(6)})

    thin, plain = count(packs), count(whole)
    tables = {"grouped_low_rank": 2, "arange": 1, "eq": 1, "_to_copy": 1, "index_select": 1}  # once, before the blocks
    assert thin["grouped_low_rank"] == 4 * 2 + 2, "of two blocks and the tables"
    assert thin.total() - plain.total() == 4 * 2 + sum(tables.values())
    assert all(thin[name] - plain[name] == count for name, count in tables.items() if name != "grouped_low_rank")
    assert thin["mm"] == plain["mm"] + 2 * 2 and thin["grouped_linear"] == 1, "one product for all rows"
    mixed = count([packs[0], whole[0]])
    assert mixed.total() == thin.total() and mixed["grouped_linear"] == plain["grouped_linear"]


ENDS = {"patchify": 2, "_to_copy": 2, "cat": 1, "mm": 1, "index_select": 3, "context_broadcast": 1}
BLOCKS = {"grouped_linear": 2 * 2 + 1, "rotary_attention": 2, "addmm": 2}
COUNTS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "vit_small_patch16_dinov3": ({}, {"add_norm": 1 + 2 * 2, "linear_gelu": 2}),
    # the norm of the mean has a kernel, and so has the sub-norm of each block
    "eva02_base_patch14_224": ({}, {"add_norm": 2 * 2, "add_": 1, "linear_swiglu": 2, "norm": 1 + 2}),
    # class token: only its row of the last block is computed
    "vit_base_patch16_sapiens2": (
        {"num_kv_heads": (2, 1)},
        {"add_norm": 1 + 2 * 2, "linear_swiglu": 2, "_to_copy": 1, "index_select": 4, "context_broadcast": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", COUNTS)
def test_kernels_of_tasks_with_rotary_embedding_and_swiglu(make_lab: Any, model: str) -> None:
    kwargs, own = COUNTS[model]
    lab = make_lab(model=model, **kwargs)
    packs = {name: lab.pack(name, size=size, seed=i) for i, (name, size) in enumerate((("a", 32), ("b", (32, 48))))}
    found = launches(lab.bank(packs, dtype=torch.bfloat16, kernels=True), {"a": 2, "b": 1})
    assert found == {name: count for name, count in {**ENDS, **BLOCKS, **own}.items() if count}


@pytest.mark.parametrize(
    ("transforms", "kwargs"),
    [((Transform("parallelize", {"branches": 2}),), {"qk_norm": True, "init_values": 0.5}),
     ((Transform("add_context_broadcast", {"scale": True}),), {"global_pool": "avg", "depth": 1}),
     ((), {"model": "vit_small_patch16_dinov3", "depth": 1}),
     ((), {"model": "eva02_base_patch14_224", "depth": 1, "scale_attn_inner": True}),
     ((), {"model": "vit_small_patch16_rope_mixed_224", "depth": 2}),
     ((), {"model": "vit_base_patch16_sapiens2", "num_heads": 2, "embed_dim": 32, "num_kv_heads": (1, 2)})],
    ids=["parallel, qk-norm", "CB_S, mean", "DINOv3", "EVA-02", "RoPE-mixed", "Sapiens2"],
)  # fmt: skip
def test_the_kernels_themselves_with_padding(
    make_lab: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, transforms: Any, kwargs: Any
) -> None:
    if not tools.interpreting:
        pytest.skip("kernels run on the card: test_gpu.py")
    lab = make_lab(transforms, **{"embed_dim": 16, "num_heads": 1, **kwargs})
    packs = {"a": lab.pack("a", size=16, seed=1, scales=0.7), "b": lab.pack("b", size=(16, 8), seed=2, scales=0.7)}
    bank = lab.bank(packs, fused=True, kernels=True, dtype=torch.float32)
    images = {n: x.float() for n, x in tools.random_batch(bank, {"a": 1, "b": 2}).items()}
    for name in ("grouped_linear", "packed_attention", "context_broadcast", "add_norm"):
        monkeypatch.setattr(fused, name, partial(getattr(fused, name), use_triton=True))

    def normalized(x: Any, spec: NormSpec, kernels: bool) -> Any:
        return norm(x, spec.eps, rms=spec.kind == "rms", use_triton=True)[0]

    monkeypatch.setattr(fused, "normalize", normalized)
    monkeypatch.setattr(fused_calls, "patchify", partial(fused_calls.patchify, use_triton=True))
    exact = Bucket.exact
    monkeypatch.setattr(Bucket, "exact", classmethod(lambda _, p: Bucket(exact(p).rows + 5, exact(p).segments + 2, 16)))
    found = bank(images)
    for name, path in packs.items():
        wanted = lab.alone(path)(images[name].double())
        assert (found[name].double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("form", ["separate", "epilogue"])
@pytest.mark.parametrize("tasks", [("a", "b", "codes"), ("a", "whole"), ("codes",)], ids="-".join)
def test_the_kernels_themselves_with_factors(
    make_lab: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, tasks: tuple[str, ...], form: str
) -> None:
    if not tools.interpreting:
        pytest.skip("kernels run on the card: test_gpu.py")
    lab = make_lab(embed_dim=16, num_heads=1, depth=2, init_values=0.5)
    packs = {
        "a": lab.factors("a", ranks=(3, 0, 13), size=16, seed=1), "whole": lab.pack("whole", size=16, seed=3),
        "b": lab.factors("b", ranks=(1, 2), size=(16, 8), seed=2), "codes": lab.factors("c", dtype="int8", size=16),
    }  # fmt: skip
    bank = lab.bank({n: packs[n] for n in tasks}, fused=True, kernels=True, dtype=torch.float32)
    images = {n: x.float() for n, x in tools.random_batch(bank, {n: 1 + i for i, n in enumerate(tasks)}).items()}
    started = []
    for module in (fused, grouped_weights):
        for name in ("grouped_linear", "grouped_low_rank", "low_rank_linear", "packed_attention", "add_norm"):
            if hasattr(module, name):
                kernel = partial(getattr(module, name), use_triton=True)
                monkeypatch.setattr(module, name, lambda *a, k=kernel, n=name, **b: (started.append(n), k(*a, **b))[1])
    monkeypatch.setattr(grouped_weights, "choose", lambda *_: form)
    found = bank(images)
    one = form == "epilogue" and len(tasks) == 1  # one type of factors, and no task of whole matrices
    assert set(started) >= ({"low_rank_linear"} if one else {"grouped_low_rank"})
    for name in tasks:
        wanted = lab.alone(packs[name])(images[name].double())
        assert (found[name].double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_a_model_that_cannot_be_folded(make_lab: Any, tools: Any) -> None:
    lab = make_lab(model="vit_relpos_small_patch16_224")
    pack = lab.pack("a")
    with pytest.raises(UsageError, match=r"cannot fold `blocks.0.attn`: each .*; create the bank with fused=False$"):
        lab.bank({"a": pack}, fused=True)
    bank = lab.bank({})
    bank._graphs = BucketGraphs()  # as on CUDA
    with pytest.raises(UsageError, match="cannot fold"):  # nor may graphs, which were asked for, be left out silently
        bank.add("a", pack)
    bank._graphs = None
    bank.add("a", pack)
    assert tools.worst_error(bank, tools.random_batch(bank, {"a": 2}), {"a": lab.alone(pack)}) <= 1e-12


def test_images_of_any_type_and_place_in_one_call(five: Any) -> None:
    lab, packs = five
    bank = lab.bank(packs, fused=True)
    images = {"pets": torch.ones(1, 3, 32, 32), "cats": torch.ones(1, 3, 32, 32, dtype=torch.float16)}
    found = bank(images)
    for name, x in images.items():
        wanted = lab.alone(packs[name])(x.double())
        assert (found[name] - wanted).abs().max() <= 1e-12 * wanted.abs().max()


def test_a_fused_bank_in_bfloat16(make_lab: Any) -> None:
    lab = make_lab()
    path = lab.pack("a")
    bank = lab.bank({"a": path}, dtype=torch.bfloat16, fused=True)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    logits, wanted = bank({"a": x})["a"], lab.alone(path)(x.double())
    assert logits.dtype == torch.bfloat16
    assert (logits.double() - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_a_task_without_classifier_among_others() -> None:
    kwargs = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "num_heads": 1, "depth": 1}
    some, none = (timm.create_model("vit_tiny_patch16_224", num_classes=n, **kwargs).eval() for n in (3, 0))
    shared = fold(some, (32, 32), torch.float32).shared
    assert shared is not None
    fold(some, (32, 32), torch.float32, whole=False).check(shared, "a")
    with pytest.raises(UsageError, match=r"a: its head is of another kind.*; create the bank with fused=False, or"):
        fold(none, (32, 32), torch.float32, whole=False).check(shared, "a")


def test_the_last_task_goes_while_a_pack_of_another_model_is_read(make_lab: Any, tools: Any) -> None:
    labs = [make_lab(depth=depth) for depth in (1, 2)]
    first, second = (lab.pack("a") for lab in labs)
    bank = TaskBank(dtype=torch.float64, fused=True)
    bank.add("first", first)
    read = bank._loader.load(second, bank._state)
    bank.remove("first")
    bank._commit("second", read)
    models = {"second": labs[1].alone(second)}
    assert tools.worst_error(bank, tools.random_batch(bank, {"second": 2}), models) <= 1e-12
