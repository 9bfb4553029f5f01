"""Packs of factors in a bank, beside whole packs, against the changes added to the base's matrices in fp64."""

from typing import Any

import pytest
import torch

from vtk.models.packed.low_rank import LowRankMatrix

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
        "some": lab.factors("some", ranks=(1,), seed=6, whole=("blocks.0.attn.proj", "pos_embed")),
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
