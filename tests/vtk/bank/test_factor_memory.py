"""Bytes of packs of factors in a bank, and merged copies of the most used of them in the room that is left."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from vtk.bank import TaskBank
from vtk.bank.folded import merge
from vtk.bank.hot_tasks import CLEARLY, HALF_LIFE, LEAST, HotTasks
from vtk.errors import UsageError
from vtk.models.create import build_model
from vtk.packs.synthetic import write_synthetic

C, N, RANK, CLASSES, DEPTH = 32, 17, 2, 3, 2  # of the lab's models at 32 px


@pytest.fixture(scope="module")
def four(make_lab: Any) -> Any:
    lab = make_lab()
    packs = {name: lab.factors(name, ranks=(RANK,), seed=i) for i, name in enumerate("abc")}
    return lab, packs | {"codes": lab.factors("codes", ranks=(RANK,), seed=9, dtype="int8")}


def own_numbers(each: int) -> tuple[int, int]:
    """Return the numbers of a task's factors, and of its other tensors, counted by hand."""
    factors = DEPTH * each * ((3 * C + C) + (C + C)) + each * ((N - 1) + C)
    return factors, DEPTH * (3 * C + C) + C + CLASSES * (C + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_task_takes_its_factors_biases_tokens_and_classifier(four: Any, dtype: torch.dtype) -> None:
    lab, packs = four
    bank = lab.bank(packs, dtype=dtype)
    memory = bank.memory()
    factors, others = own_numbers(RANK)
    assert memory.tasks["a"].bytes == dtype.itemsize * (factors + others)
    scales = (DEPTH * 2 + 1) * RANK * (8 if dtype == torch.float64 else 4)  # one for a and b together
    assert memory.tasks["codes"].bytes == factors + scales + dtype.itemsize * others
    assert all(task.factors and task.on_device and not task.merged_bytes for task in memory.tasks.values())
    assert memory.device_bytes == memory.base_bytes + sum(task.bytes for task in memory.tasks.values())
    assert memory.factor_bytes == sum(task.bytes for task in memory.tasks.values())
    assert 0 < memory.host_bytes < memory.base_bytes


def test_every_tensor_is_counted_once(four: Any) -> None:
    lab, packs = four
    for way in ({}, {"fused": False}):
        bank = lab.bank({**packs, "head": lab.pack("head", train="head"), "whole": lab.pack("whole", seed=3)}, **way)
        state, held = bank._state, bank._store.held
        found = [*state.shared.held(), *state.attention.tensors(), *state.positions.tensors()]
        found += [] if state.ends is None else state.ends.tensors()
        found += [t for m in state.models.values() for t in (m.table, m.pos_embed) if t is not None]
        tables = [e.pos_embed for e in state.entries.values() if e.pos_embed is not None]
        assert len(tables) == (4 if way else 0)  # of a bank that is not folded
        found += [t for table in tables for t in table.own()]
        found += [t for e in state.entries.values() if e.end is not None for t in e.end.state_dict().values()]
        for weights in held.values():
            for matrix in (m for part in weights for m in part.values()):
                found += [matrix] if isinstance(matrix, torch.Tensor) else [matrix.base, *matrix.own()]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found if not t.is_meta}
        assert sum(storages.values()) == bank.memory().device_bytes


def test_the_most_used_get_merged_copies_in_the_room_that_is_left(four: Any, tools: Any) -> None:
    lab, packs = four
    models = {name: lab.alone(path) for name, path in packs.items()}
    for way in ({}, {"fused": False}):
        whole = lab.bank(packs, **way).memory()
        copy = DEPTH * 8 * (3 * C * C + C * C)
        bank = lab.bank(packs, max_bytes=whole.device_bytes + 2 * copy + 8, **way)

        def merged(bank: TaskBank = bank, copy: int = copy) -> set[str]:
            memory = bank.memory()
            assert memory.device_bytes <= bank.max_bytes
            assert memory.merged_bytes == copy * sum(task.merged_bytes > 0 for task in memory.tasks.values())
            assert all(task.on_device for task in memory.tasks.values())  # copies take no room from factors
            return {name for name, task in memory.tasks.items() if task.merged_bytes}

        def call(*names: str, times: int, bank: TaskBank = bank) -> None:
            for _ in range(times):
                assert tools.worst_error(bank, tools.random_batch(bank, dict.fromkeys(names, 1)), models) <= 1e-12

        assert merged() == set()
        call("a", times=int(LEAST))
        assert merged() == set()  # a little less than so many
        call("a", "b", times=int(LEAST) + 1)
        assert merged() == {"a", "b"}
        call("codes", times=int(LEAST) + 1)
        assert merged() == {"a", "b"}  # not clearly more often
        call("codes", times=int(CLEARLY * 2 * LEAST))
        assert merged() == {"a", "codes"}  # in place of the one used least
        bank.reload("codes")
        assert merged() == {"a"}
        call("a", "codes", times=1)
        bank.remove("a")
        assert merged() == set()
        call("b", "c", "codes", times=2)


def test_whole_tasks_that_are_called_take_the_room_of_copies(four: Any, tools: Any) -> None:
    lab, packs = four
    mixed = {**packs, "whole": lab.pack("whole", seed=3)}
    copy = DEPTH * 8 * (3 * C * C + C * C)
    bank = lab.bank(mixed, max_bytes=lab.bank(mixed).memory().device_bytes + copy)
    for _ in range(2 * int(LEAST)):
        bank(tools.random_batch(bank, {"a": 1, "b": 1}))
    assert bank.memory().merged_bytes == 2 * copy  # one in the room of the whole one
    bank(tools.random_batch(bank, {"whole": 1}))
    memory = bank.memory()
    assert memory.merged_bytes == copy and memory.device_bytes <= bank.max_bytes and memory.tasks["whole"].on_device


def test_copies_leave_room_for_factors_that_are_absent(four: Any, tools: Any) -> None:
    lab, packs = four
    mixed = {**packs, "whole": lab.pack("whole", seed=3)}
    whole, copy = lab.bank(mixed), DEPTH * 8 * (3 * C * C + C * C)
    memory = whole.memory()
    bank = lab.bank(mixed, max_bytes=memory.device_bytes - (memory.tasks["whole"].bytes - copy) - 8)
    bank(tools.random_batch(bank, {"b": 1, "c": 1, "codes": 1}))
    bank(tools.random_batch(bank, {"whole": 1}))
    assert not bank.memory().tasks["a"].on_device  # the one used least went for it
    bank.remove("whole")
    for _ in range(2 * int(LEAST)):
        bank(tools.random_batch(bank, {"b": 1}))
    assert bank.memory().merged_bytes == 0  # it would fit beside the factors that are present


def test_a_copy_of_a_task_that_goes_while_it_is_made(four: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab, packs = four
    bank = lab.bank(packs, max_bytes=1 << 30)
    images = tools.random_batch(bank, {"a": 1})

    def gone(weights: Any) -> Any:
        bank.remove("a")
        return merge(weights)

    monkeypatch.setattr("vtk.bank.stores.merge", gone)
    while "a" in bank.tasks:
        bank(images)
    assert not bank._store.merged and bank.memory().merged_bytes == 0
    bank.add("a", packs["a"])
    assert tools.worst_error(bank, images, {"a": lab.alone(packs["a"])}) <= 1e-12


def test_equal_tables_of_factor_packs_count_with_the_base(make_lab: Any) -> None:
    lab = make_lab(model="vit_small_patch16_dinov3", depth=1)  # without learned positions
    packs = {name: lab.pack(name, seed=i) if name == "b" else lab.factors(name, seed=i) for i, name in enumerate("abc")}
    bank = lab.bank(packs)
    for name in ("b", None):
        memory, ends = bank.memory(), bank._state.ends
        assert memory.device_bytes == memory.base_bytes + sum(task.bytes for task in memory.tasks.values())
        assert ends.nbytes == sum(t.nbytes for t in ends.tensors()) and len(ends.tables) == 1
        head = CLASSES * (C + 1) * 8
        assert all(ends.own_bytes(n) == head for n in bank.tasks)
        if name:
            bank.remove(name)


def test_a_budget_below_the_factors_counts_the_least_recently_used_as_absent(four: Any, tools: Any) -> None:
    lab, packs = four
    whole = lab.bank(packs)
    unit = whole._store.bytes_of(whole._state.entries["a"].number)
    limit = whole.memory().device_bytes - unit
    bank = lab.bank(packs, max_bytes=limit)
    for names in (("a", "b"), ("c", "a"), ("codes", "b"), ("c", "codes")):
        bank(tools.random_batch(bank, dict.fromkeys(names, 1)))
        memory = bank.memory()
        assert memory.device_bytes <= limit and not memory.merged_bytes
        assert all(memory.tasks[name].on_device for name in names)
    with pytest.raises(UsageError, match="needs the weights of 4 tasks at once and `max_bytes` leaves room for"):
        bank(tools.random_batch(bank, dict.fromkeys(packs, 1)))
    with pytest.raises(UsageError, match=f"`max_bytes` is {limit // 8}: the shared weights"):
        lab.bank(packs, max_bytes=limit // 8)
    with pytest.raises(UsageError, match="`max_bytes` and `max_gpu_bytes` are one option"):
        TaskBank(max_bytes=1, max_gpu_bytes=1)


@given(st.lists(st.sets(st.integers(0, 3), min_size=1), max_size=40), st.integers(-1, 3))
def test_uses_halve_and_copies_go_to_the_most_used(calls: list[set[int]], most: int) -> None:
    hot, copies = HotTasks(), set[int]()
    for i, called in enumerate(calls):
        hot.use(called)
        for n in range(4):
            wanted = sum(0.5 ** ((i - j) / HALF_LIFE) for j, c in enumerate(calls[: i + 1]) if n in c)
            assert hot.score(n) == pytest.approx(wanted)
        new, old = hot.choose(called, copies, most)
        if new is not None:
            assert new in called - copies and hot.score(new) >= LEAST
            assert hot.score(new) == max(hot.score(n) for n in called - copies)
            if old is not None:
                assert len(copies) >= most and hot.score(new) > CLEARLY * hot.score(old)
                copies.discard(old)
            copies.add(new)
        assert len(copies) <= max(0, most)


BOUNDS = {"vit_small_patch16_224": (3.4, 2.35), "vit_base_patch16_224": (2.2, 1.7)}


@pytest.mark.slow
@pytest.mark.parametrize("model", BOUNDS)
def test_a_hundred_tasks_of_rank_16_in_units_of_one_model(tmp_path: Path, model: str) -> None:
    torch.manual_seed(0)
    save_file(timm.create_model(model).state_dict(), tmp_path / "base.safetensors")
    created = build_model(model, num_classes=10, weights=tmp_path / "base.safetensors")
    unit = 2 * sum(p.numel() for p in created.model.parameters())
    for dtype, bound in zip(("bf16", "int8"), BOUNDS[model], strict=True):
        pack = write_synthetic(tmp_path / dtype, created, rank=16, dtype=dtype)  # type: ignore[arg-type]
        bank = TaskBank(tmp_path / "base.safetensors", dtype=torch.bfloat16)
        for i in range(100):
            bank.add(str(i), pack)
        assert bank.memory().device_bytes <= bound * unit


def test_a_task_is_called_often_in_a_budget_below_the_factors(four: Any, tools: Any) -> None:
    lab, packs = four
    models = {name: lab.alone(path) for name, path in packs.items()}
    for way in ({}, {"fused": False}, {"kernels": True}):
        bank = lab.bank(packs, max_bytes=lab.bank(packs, **way).memory().device_bytes - 8, **way)
        for _ in range(2 * int(LEAST)):
            assert tools.worst_error(bank, tools.random_batch(bank, {"a": 1}), models) <= 1e-12
        assert bank.memory().merged_bytes == 0
