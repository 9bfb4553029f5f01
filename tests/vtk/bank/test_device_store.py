"""The device store by itself: tasks of whole matrices and of factors come, go, page in and out and are merged."""

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vtk.bank.folded import Weights
from vtk.bank.grouped_weights import GroupedMatrix, SmallStack
from vtk.bank.stacks import StackStore
from vtk.errors import UsageError
from vtk.models.packed.low_rank import Change, LowRankMatrix
from vtk_kernels.grouped_linear import make_tile_map

C, LAYERS = 4, 2
SHAPES = {"qkv.weight": (3 * C, C), "proj.weight": (C, C)}
GAMMA = torch.rand(C)
Task = list[dict[str, Tensor | LowRankMatrix]]


@pytest.fixture(scope="module")
def base() -> list[dict[str, Tensor]]:
    return [{key: torch.randn(shape, dtype=torch.float64) for key, shape in SHAPES.items()} for _ in range(LAYERS)]


def task(base: list[dict[str, Tensor]], rank: int | None, *, codes: bool = False) -> Weights:
    """A task of a rank, or of whole matrices; biases of its own."""
    found: Task = []
    for i in range(LAYERS):
        part: dict[str, Tensor | LowRankMatrix] = {}
        for j, (key, (f, k)) in enumerate(SHAPES.items()):
            part[key.replace("weight", "bias")] = torch.randn(f, dtype=torch.float64)
            r = None if rank is None else (rank + i + j if rank else 0)  # mixed among a task's matrices
            if r is None:
                part[key] = torch.randn(f, k, dtype=torch.float64)
                continue
            a, b = torch.randn(r, k, dtype=torch.float64), torch.randn(f, r, dtype=torch.float64)
            change = Change(a, b)
            if codes:
                a, b = ((t * 40).clamp(-127, 127).to(torch.int8) for t in (a, b))
                change = Change(a, b, torch.rand(r) / 500, GAMMA if key == "qkv.weight" else None)
            part[key] = LowRankMatrix(base[i][key], (change,) if r else ())
        part["q_norm.weight"] = torch.randn(2, dtype=torch.float64)
        found.append(part)
    return tuple(found)


def product(store: StackStore, numbers: list[int], layer: int, key: str, x: Tensor, rows: int) -> Tensor:
    """Multiply ``rows`` rows of each task as `vtk.bank.forward` does."""
    with store.turn():
        slots, layers = store.layers(numbers)
        weights: Mapping = list(layers)[layer]
        order = sorted(range(len(numbers)), key=lambda i: (slots[i].group, slots[i].own))
        w = weights[key]
        at = torch.tensor([0, *[rows] * len(numbers)]).cumsum(0).to(torch.int32)
        tiles = make_tile_map(at, 2)  # of the call's tasks in order
        whole, thin = (tiles.clone() for _ in range(2))
        for tile in range(tiles.shape[1]):
            slot = slots[order[int(tiles[0, tile])]]
            whole[0, tile] = slot.group
            thin[0, tile] = -1 if slot.thin is None else slot.thin
        x = x[torch.tensor([rows * i + r for i in order for r in range(rows)])]
        if isinstance(w, GroupedMatrix):
            y = w.multiply(x, whole if any(s.thin is None for s in slots) else None, thin)
        else:
            from vtk_kernels.grouped_linear import grouped_linear

            y = grouped_linear(x, w, weights[key.replace("weight", "bias")], whole)
        back = torch.empty_like(y)
        for place, i in enumerate(order):
            back[rows * i : rows * (i + 1)] = y[rows * place : rows * (place + 1)]
        return back


def check(store: StackStore, held: Mapping[int, Weights], numbers: list[int]) -> None:
    layer, key = numbers[0] % LAYERS, list(SHAPES)[len(numbers) % 2]
    x = torch.randn(3 * len(numbers), C, dtype=torch.float64)
    found = product(store, numbers, layer, key, x, 3)
    for i, number in enumerate(numbers):
        part = held[number][layer]
        w, b = part[key], part[key.replace("weight", "bias")]
        matrix = w.merged() if isinstance(w, LowRankMatrix) else w
        expected = x[3 * i : 3 * i + 3] @ matrix.T + b
        torch.testing.assert_close(found[3 * i : 3 * i + 3], expected, rtol=1e-6, atol=1e-6)
    slots, layers = store.layers(numbers)
    own = list(layers)[layer]["q_norm.weight"]
    mixed = any(s.thin is None for s in slots)
    own = own.of_call(mixed) if isinstance(own, SmallStack) else own
    for slot, number in zip(slots, numbers, strict=True):
        assert torch.equal(own[slot.own], held[number][layer]["q_norm.weight"])  # type: ignore[arg-type]


KINDS = (None, 0, 2, 5)


@settings(max_examples=8, deadline=None)
@given(st.data(), st.booleans())
def test_every_call_finds_its_tasks_weights(data: st.DataObject, budget: bool) -> None:
    torch.manual_seed(0)
    base = [{key: torch.randn(shape, dtype=torch.float64) for key, shape in SHAPES.items()} for _ in range(LAYERS)]
    store, held = StackStore(torch.device("cpu")), dict[int, Weights]()
    unit = sum(f * k + f for f, k in SHAPES.values()) * 8 * LAYERS + 200
    if budget:
        store.set_room(7 * unit)
    for number in range(data.draw(st.integers(3, 12))):
        kind, codes = data.draw(st.sampled_from(KINDS)), data.draw(st.booleans())
        if held and data.draw(st.integers(0, 3)) == 0:
            gone = data.draw(st.sampled_from(sorted(held)))
            with store.turn():
                store.drop(gone)
            del held[gone]
        held[number] = task(base, kind, codes=codes)
        with store.turn():
            store.put(number, held[number])
        most = 2 if budget else len(held)
        called = data.draw(st.lists(st.sampled_from(sorted(held)), min_size=1, max_size=most, unique=True))
        check(store, held, called)
        if budget:
            with store.turn():
                for _ in range(5):
                    store.layers(called)
                    store.merge_hot(called)
            assert store.device_bytes() <= 7 * unit
            check(store, held, called)


def test_tasks_come_and_go_without_another_address(base: list[dict[str, Tensor]]) -> None:
    store, held = StackStore(torch.device("cpu")), {n: task(base, 3) for n in range(40)}
    for number, weights in held.items():
        store.put(number, weights)
    store.drop(7)
    before = store.generation
    for number in range(40, 60):
        held[number] = task(base, 3 - number % 3)
        store.put(number, held[number])
        check(store, held, [number, 1, number - 40] if number != 47 else [number])
        store.drop(number)
    assert store.generation == before
    store.put(60, task(base, 30))
    assert store.generation != before, "a rank above all others"


def test_factors_stay_codes_and_count_as_their_bytes(base: list[dict[str, Tensor]]) -> None:
    store = StackStore(torch.device("cpu"))
    for number in range(3):
        store.put(number, task(base, 4, codes=True))
    ranks = sum((4 + i + j) * sum(shape) for i in range(LAYERS) for j, shape in enumerate(SHAPES.values()))
    scales = sum(8 * (4 + i + j) for i in range(LAYERS) for j in range(2))
    small = LAYERS * 8 * (4 * C + 2)
    assert store.bytes_of(1) == ranks + scales + small + 16 * 2 * LAYERS
    vectors = LAYERS * 8 * (sum(map(sum, SHAPES.values())))
    matrices = LAYERS * 8 * sum(f * k for f, k in SHAPES.values())
    spare = store.device_bytes() - 3 * store.bytes_of(1) - vectors - matrices
    assert abs(spare) <= store.bytes_of(1) / 6, "spans of a second type counted, and few spare rows"


def test_a_task_that_is_called_often_gets_a_merged_copy_while_there_is_room(base: list[dict[str, Tensor]]) -> None:
    store, held = StackStore(torch.device("cpu")), {n: task(base, 1) for n in range(6)}
    store.set_room(20000)
    for number, weights in held.items():
        store.put(number, weights)
    for _ in range(6):
        check(store, held, [2, 3])
        store.merge_hot([2, 3])
    assert store.merged_bytes(2) and store.merged_bytes(3) and not store.merged_bytes(1)
    check(store, held, [1, 2, 3, 4])
    assert store.device_bytes() <= 20000
    store.set_room(sum(store.bytes_of(n) for n in held) + 600)
    assert not store.merged_bytes(2)
    check(store, held, [1, 2, 3, 4])


def test_a_task_that_comes_takes_the_room_of_merged_copies(base: list[dict[str, Tensor]]) -> None:
    store, held = StackStore(torch.device("cpu")), {n: task(base, 1) for n in range(4)}
    store.set_room(20000)
    for number, weights in held.items():
        store.put(number, weights)
    for _ in range(6):
        check(store, held, [2, 3])
        store.merge_hot([2, 3])
    assert store.merged_bytes(2) and store.merged_bytes(3)
    store.set_room(store.device_bytes())
    check(store, held, [1])
    assert store.device_bytes() <= store.room and store.merged_bytes(2) + store.merged_bytes(3) > 0  # type: ignore[operator]
    check(store, held, [0, 1, 2, 3])
    assert store.device_bytes() <= store.room  # type: ignore[operator]


def test_a_call_of_one_kind_fits_where_the_base_beside_the_other_kind_would_not(base: list[dict[str, Tensor]]) -> None:
    store, held = StackStore(torch.device("cpu")), {0: task(base, 1), 1: task(base, None)}
    matrices = LAYERS * 8 * sum(f * k for f, k in SHAPES.values())
    store.set_room(20000)
    for number, weights in held.items():
        store.put(number, weights)
    store.set_room(matrices + store.bytes_of(1) + 60)
    for number in (0, 1, 0, 1):
        check(store, held, [number])
        assert store.device_bytes() <= store.room  # type: ignore[operator]
    with pytest.raises(UsageError, match="needs the weights of 2 tasks at once"):
        store.layers([0, 1])
