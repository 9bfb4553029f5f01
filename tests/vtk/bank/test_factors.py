"""Packs of factors in a bank, beside whole packs, against the changes added to the base's matrices in fp64."""

from collections import Counter
from typing import Any

import pytest
import timm
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from vtk.card import Transform
from vtk.models.packed import products
from vtk.models.packed.low_rank import LowRankMatrix
from vtk.models.weights.files import SIZE
from vtk.packs import load_task

WAYS: dict[str, dict[str, Any]] = {"loop": {"fused": False}, "fused": {}, "fused operators": {"kernels": True}}


@pytest.fixture(scope="module")
def mixed(make_lab: Any) -> Any:
    lab = make_lab(init_values=0.5)
    return lab, {
        "a": lab.factors("a", ranks=(2, 1, 3), seed=1),
        "b": lab.factors("b", ranks=(4, 0), classes=7, size=48, seed=2),
        "none": lab.factors("none", ranks=(0,), classes=2, seed=3),
        "codes": lab.factors("codes", ranks=(3,), seed=4, dtype="int8"),
        "half": lab.factors("half", ranks=(2,), seed=5, dtype="bf16"),
        "some": lab.factors("some", ranks=(1,), seed=6, whole=("blocks.0.attn.proj", "blocks.1.attn.qkv", "pos_embed")),
        "weights": lab.factors("weights", ranks=(2,), seed=7, parts=("qkv.bias",)),
        "whole": lab.pack("whole", classes=4, seed=8),
        "head": lab.pack("head", train="head", classes=5, seed=9),
    }


@pytest.mark.parametrize("way", WAYS)
def test_packs_of_every_rank_and_type_beside_whole_ones(mixed: Any, tools: Any, way: str) -> None:
    lab, packs = mixed
    models = {name: lab.alone(path) for name, path in packs.items()}
    for order in (list(packs), list(packs)[::-1]):
        bank = lab.bank({name: packs[name] for name in order}, **WAYS[way])
        counts = {name: 1 + i % 2 for i, name in enumerate(order)}
        assert tools.worst_error(bank, tools.random_batch(bank, counts), models) <= 1e-12
        for name in order:
            assert tools.worst_error(bank, tools.random_batch(bank, {name: 1}), models) <= 1e-12


def test_nothing_is_merged(mixed: Any) -> None:
    lab, packs = mixed
    for way in ({"fused": False}, {}):
        bank = lab.bank(packs, **way)
        held = bank._store.held
        bases = {}
        for name in ("a", "b", "none", "codes", "half", "weights", "head"):
            for i, part in enumerate(held[bank._state.entries[name].number]):
                for key in ("qkv.weight", "proj.weight"):
                    matrix = part[key]
                    assert isinstance(matrix, LowRankMatrix)
                    assert bases.setdefault((i, key), matrix.base) is matrix.base  # one tensor for all tasks
        assert not bank._store.merged
        codes = held[bank._state.entries["codes"].number][0]["qkv.weight"].changes[0]
        assert codes.a.dtype == codes.b.dtype == torch.int8


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_ranks_tasks_and_sizes(any_ranks: Any, tools: Any, data: st.DataObject) -> None:
    lab, packs = any_ranks
    names = data.draw(st.lists(st.sampled_from(sorted(packs)), min_size=1, max_size=6, unique=True))
    counts = {name: data.draw(st.integers(0, 3)) for name in names}
    way = data.draw(st.sampled_from([{"fused": False}, {}]))
    bank = lab.bank({name: packs[name][0] for name in names}, **way)
    images = tools.random_batch(bank, counts)
    assert tools.worst_error(bank, images, {name: packs[name][1] for name in names}) <= 1e-12


@pytest.fixture(scope="module")
def any_ranks(make_lab: Any) -> Any:
    """Packs of ranks 0 to full, of three sizes, with their own models."""
    lab = make_lab(depth=1)
    ranks = [(0,), (1, 0), (5, 2, 1), (32,), (0, 0, 7), (3, 17)]
    sizes = (32, 48, 16, 32, 32, 48)
    paths = {
        f"{i}": lab.factors(f"{i}", ranks=r, classes=1 + i, size=side, seed=7 * i)
        for i, (r, side) in enumerate(zip(ranks, sizes, strict=True))
    }  # fmt: skip
    return lab, {name: (path, lab.alone(path)) for name, path in paths.items()}


FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[Transform, ...]]] = {
    "gated, heads' norm, rotary": (
        "naflexvit_base_patch16_gap", {"rope_type": "axial", "attn_gated": True, "scale_attn_inner_norm": True}, (),
    ),
    "split q, k, v and a norm of the heads' outputs": (
        "eva02_base_patch14_224", {"scale_attn_inner": True, "mlp_ratio": 2.0}, (),
    ),
    "parallel branches, qk-norm": (
        "vit_tiny_patch16_224", {"depth": 4, "init_values": 0.5, "qk_norm": True},
        (Transform("parallelize", {"branches": 2}),),
    ),
    "CB_S before attention": (
        "vit_tiny_patch16_224", {},
        (Transform("add_context_broadcast", {"placement": "front", "on": "both", "scale": True}),),
    ),
    "biases of relative positions": ("beit_base_patch16_224", {}, ()),
    "learned rotary frequencies": ("vit_small_patch16_rope_mixed_224", {}, ()),
    "keys and values of fewer heads": ("vit_base_patch16_sapiens2", {"num_kv_heads": (2, 1), "mlp_ratio": 2.0}, ()),
    "DINOv3": ("vit_small_patch16_dinov3", {}, ()),
    "distillation token": ("deit_tiny_distilled_patch16_224", {}, ()),
    "dynamic size": ("vit_tiny_patch16_224", {"dynamic_img_size": True}, ()),
    "registers without positions": ("vit_tiny_patch16_224", {"reg_tokens": 4, "no_embed_class": True}, ()),
    "map pooling": ("vit_tiny_patch16_224", {"global_pool": "map", "class_token": False}, ()),
    "mean pooling, fc_norm, pre_norm": ("vit_tiny_patch16_224", {"global_pool": "avg", "pre_norm": True}, ()),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_factors_of_every_form_of_attention(make_lab: Any, tools: Any, family: str) -> None:
    model, kwargs, transforms = FAMILIES[family]
    lab = make_lab(transforms, model=model, **kwargs)
    packs = {
        "a": lab.factors("a", seed=1), "b": lab.factors("b", size=(32, 48), classes=1, seed=2, ranks=(2,)),
        "codes": lab.factors("codes", seed=4, dtype="int8"), "whole": lab.pack("whole", seed=3),
    }  # fmt: skip
    models = {name: lab.alone(path) for name, path in packs.items()}
    for way in WAYS.values():
        bank = lab.bank(packs, **way)
        images = tools.random_batch(bank, {"b": 1, "a": 2, "whole": 1, "codes": 1})
        assert tools.worst_error(bank, images, models) <= 1e-12
        if not way.get("kernels"):
            first = bank._store.held[bank._state.entries["a"].number][0]
            assert sum(isinstance(m, LowRankMatrix) for m in first.values()) >= 2


def test_tasks_with_factors_come_go_and_change(mixed: Any, tools: Any) -> None:
    lab, packs = mixed
    models = {name: lab.alone(path) for name, path in packs.items()}
    for way in WAYS.values():
        bank = lab.bank({"head": packs["head"], "a": packs["a"]}, **way)
        bank.add("whole", packs["whole"])
        bank.add("b", packs["b"])
        bank.remove("a")
        bank.add("codes", load_task(packs["codes"], base=lab.weights))  # loaded, as the command's benchmark gives it
        bank.reload("b")
        counts = {"b": 1, "head": 1, "codes": 2, "whole": 1}
        assert tools.worst_error(bank, tools.random_batch(bank, counts), models) <= 1e-12
        for name in tuple(bank.tasks):
            bank.remove(name)
        assert bank.memory().device_bytes == bank.memory().base_bytes
        bank.add("a", packs["a"])
        assert tools.worst_error(bank, tools.random_batch(bank, {"a": 1}), models) <= 1e-12


def test_adding_reads_only_the_pack(mixed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, packs = mixed
    bank = lab.bank({"a": packs["a"], "b": packs["b"]})  # of both sizes
    monkeypatch.setattr("vtk.bank.loader.load_task", None)  # no model is built, no base is read
    found = []
    for i in range(6):
        with Counting() as counting:
            bank.add(f"more{i}", packs["half"])
        found.append(counting.counts.total())
    assert len(set(found)) == 1  # as many operations beside 7 tasks as beside 2


def test_rows_of_all_tasks_with_factors_are_one_product(
    mixed: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, packs = mixed
    bank = lab.bank(packs)
    tasks: list[int] = []
    original = products._multiply

    def counted(x: Any, w: Any, b: Any, group: Any, y: Any) -> None:
        tasks.append(len(group))
        original(x, w, b, group, y)

    monkeypatch.setattr(products, "_multiply", counted)
    bank(tools.random_batch(bank, dict.fromkeys(("a", "whole", "codes", "head", "b"), 1)))
    assert tasks[:2] == [1, 4]  # qkv of the first block: the whole pack's rows, then those of all others


def test_a_call_does_nothing_for_idle_tasks(mixed: Any, tools: Any) -> None:
    lab, packs = mixed
    for way in (WAYS["loop"], WAYS["fused"]):
        counts = []
        for more in (0, 4):
            bank = lab.bank({**{n: packs[n] for n in "ab"}, **{f"{i}": packs["half"] for i in range(more)}}, **way)
            images = tools.random_batch(bank, {"a": 1, "b": 1})
            bank(images)
            with Counting() as counting:
                bank(images)
            counts.append(counting.counts)
        assert counts[0] == counts[1]


class Counting(TorchDispatchMode):
    """Counts operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_table_of_the_base_is_resampled_as_each_pack_says(make_lab: Any, tools: Any) -> None:
    """Files of one base may tell the layout of its position table differently, or not at all."""
    lab = make_lab(depth=1)
    values = timm.create_model(lab.model, img_size=(16, 64), **lab.kwargs).state_dict()  # 16 patches: also 4 by 4
    files = {name: lab.root / f"{name}.safetensors" for name in ("wide", "silent")}
    save_file(values, files["wide"], {SIZE: "16x64"})
    save_file(values, files["silent"])
    packs = {}
    for name, lab.weights in files.items():
        packs[name] = lab.factors(name, size=48, seed=1)
    models = {name: load_task(path, base=files[name]).model.double() for name, path in packs.items()}
    images = tools.random_batch(lab.bank({"wide": packs["wide"]}), {"wide": 1})["wide"]
    given = dict.fromkeys(packs, images)
    assert (models["wide"](images) - models["silent"](images)).abs().max() > 1e-3
    for lab.weights in files.values():
        for way in WAYS.values():
            for order in (list(packs), list(packs)[::-1]):
                bank = lab.bank({name: packs[name] for name in order}, **way)
                # packs are merged in fp32 there
                assert tools.worst_error(bank, given, models) <= 1e-6


def test_unfolded_tasks_without_any_bias(make_lab: Any, tools: Any) -> None:
    lab = make_lab(depth=1, qkv_bias=False, proj_bias=False)
    packs = {"a": lab.factors("a", seed=1), "none": lab.factors("none", ranks=(0,), seed=2), "whole": lab.pack("whole")}
    models = {name: lab.alone(path) for name, path in packs.items()}
    for way in (*WAYS.values(), {"fused": False, "kernels": True}):
        bank = lab.bank(packs, **way)
        assert tools.worst_error(bank, tools.random_batch(bank, dict.fromkeys(packs, 1)), models) <= 1e-12
        bank.remove("a")
        bank.add("b", packs["a"])
        counts, own = {"b": 2, "none": 1}, {"b": models["a"], "none": models["none"]}
        assert tools.worst_error(bank, tools.random_batch(bank, counts), own) <= 1e-12
