"""Rotary tables of a bank: one for each image size, one for each task that trained its frequencies, and their bytes."""

import math
from typing import Any

import pytest
import torch

from vtk.bank.positions import read_positions
from vtk.errors import UsageError

DINOV3, MIXED = "vit_small_patch16_dinov3", "vit_small_patch16_rope_mixed_224"
SIZES = {"a": 32, "b": 32, "c": (32, 48)}


@pytest.fixture(scope="module")
def dinov3(make_lab: Any) -> Any:
    lab = make_lab(model=DINOV3)
    return lab, {name: lab.pack(name, size=size, seed=i) for i, (name, size) in enumerate(SIZES.items())}


@pytest.mark.parametrize("way", [{"fused": False}, {"kernels": True}], ids=["unfused", "fused"])
def test_tasks_of_one_size_share_tables(dinov3: Any, tools: Any, way: dict[str, Any]) -> None:
    lab, packs = dinov3
    bank = lab.bank(packs, **way)
    rows = {"a": 5 + 4 * 4, "b": 5 + 4 * 4, "c": 5 + 4 * 6}  # class token, four registers
    before, memory = bank._state.positions, bank.memory()
    assert before.rope.shape == (1, 1, rows["a"] + rows["c"], 16)
    assert before.first_row("a") == before.first_row("b") != before.first_row("c")
    assert memory.device_bytes == memory.base_bytes + sum(t.bytes for t in memory.tasks.values())
    # what "a" and "b" have alike counts with the base, the tables of "c" with "c"
    of_c = rows["c"] * 16 * 8 + (0 if bank._state.ends is None else rows["c"] * 32 * 8)
    assert memory.tasks["c"].bytes - memory.tasks["a"].bytes == of_c
    if bank._state.ends is not None:
        assert len(bank._state.ends.table) == rows["a"] + rows["c"]
        stacks = [t for part in bank._store.pools.whole.stacks for t in part.values()]
        tensors = (*bank._state.shared.held(), *bank._state.ends.tensors(), *before.tensors(), *stacks)
        assert sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values()) == (
            memory.device_bytes
        )
    bank.remove("a")
    assert bank._state.positions.rope.shape[2] == rows["b"] + rows["c"]
    bank.remove("b")
    assert bank._state.positions.rope.shape[2] == rows["c"]
    assert tools.worst_error(bank, tools.random_batch(bank, {"c": 2}), {"c": lab.alone(packs["c"])}) <= 1e-12
    bank.remove("c")
    assert bank._state.positions.rope is None


def test_the_table_is_the_angles_of_each_patch(dinov3: Any) -> None:
    lab, packs = dinov3
    rope = read_positions(lab.alone(packs["c"]), (32, 48), torch.float64).rope[0, 0]
    assert torch.equal(rope[:5], torch.tensor([1.0] * 8 + [0.0] * 8, dtype=torch.float64).expand(5, 16))
    for row, column in ((0, 0), (3, 5), (1, 4)):
        y, x = ((2 * at + 1) / size - 1 for at, size in ((row, 4), (column, 6)))
        angles = [2 * math.pi * at / 100 ** (i / 4) for at in (y, x) for i in range(4)]
        wanted = torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles], dtype=torch.float64)
        assert (rope[5 + row * 6 + column] - wanted).abs().max() <= 1e-5  # timm has coordinates and periods in fp32


def test_trained_frequencies_are_the_task_s_own(make_lab: Any, tools: Any) -> None:
    lab = make_lab(model=MIXED)
    packs = {name: lab.pack(name, train=train, seed=i) for i, (name, train) in enumerate((("a", "attn"), ("b", "head"),
             ("c", "attn"), ("d", "head")))}  # fmt: skip
    models = {name: lab.alone(path) for name, path in packs.items()}
    assert not torch.equal(models["a"].rope.freqs, models["b"].rope.freqs)
    bank = lab.bank(packs)
    assert bank._state.positions.rope.shape == (2, 2, 3 * 17, 16)  # of each block and head; those of the base once
    assert tools.worst_error(bank, tools.random_batch(bank, {"d": 1, "c": 2, "a": 1, "b": 1}), models) <= 1e-12


def test_pairs_of_channels_with_two_angles_are_refused(dinov3: Any) -> None:
    lab, packs = dinov3
    model = lab.alone(packs["a"])
    embed = model.rope.get_embed(shape=[4, 4])
    model.rope.get_embed = lambda **_: torch.cat((embed[:, :1] + 1, embed[:, 1:]), 1)
    with pytest.raises(UsageError, match=r"cannot fuse `rope`: .* different angles; serve it as a separate model"):
        read_positions(model, (32, 32), torch.float64)
