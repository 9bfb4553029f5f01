"""Arenas of factors: rows come, go and move; what a slot holds is always what was put there last."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vtk.bank.arena_rows import ArenaRows
from vtk.bank.arenas import Arena
from vtk.models.packed.low_rank import Change, LowRankMatrix

F, K = 6, 5
BASE = torch.randn(F, K, dtype=torch.float64)


def put(arena: Arena, slot: int, rows: ArenaRows, **kwargs: bool) -> None:
    assert arena.accept(rows)
    arena.reserve(slot, rows.rank, **kwargs)
    arena.write(slot, rows)


def rows_of(rank: int) -> ArenaRows:
    return ArenaRows(torch.randn(rank, K, dtype=torch.float64), torch.randn(rank, F, dtype=torch.float64))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 40)), max_size=40))
def test_a_slot_holds_what_was_put_there_last(steps: list[tuple[int, int]]) -> None:
    arena, held = Arena(BASE, 6, codes=False), dict[int, ArenaRows]()
    for slot, rank in steps:  # a rank of −1 drops
        if slot in held:
            arena.drop(slot)
            del held[slot]
        if rank >= 0:
            held[slot] = rows_of(rank)
            put(arena, slot, held[slot])
        taken = [set(range(first, first + rank)) for first, rank in arena.spans.tolist()]
        assert sum(map(len, taken)) == len(set().union(*taken)) <= arena.capacity
        for at in range(6):
            first, rank = arena.spans[at].tolist()
            assert rank == (held[at].rank if at in held else 0) <= max(arena.rank, 0)
            if at in held:
                assert torch.equal(arena.a[first : first + rank], held[at].a)
                assert torch.equal(arena.b[first : first + rank], held[at].b)
        used = sum(rows.rank for rows in held.values())
        assert arena.capacity <= max(2 * used, used + used // 16 + 1), "more than half of it is free"


def test_tasks_come_and_go_within_the_capacity_at_one_address() -> None:
    arena = Arena(BASE, 4, codes=False)
    for slot, rank in enumerate((8, 5, 8, 3)):
        put(arena, slot, rows_of(rank))
    before = arena.generation, arena.a.data_ptr(), arena.b.data_ptr(), arena.spans.data_ptr()
    for slot, rank in ((1, 5), (3, 2), (0, 7), (2, 9), (0, 3)):  # 9 rows are free at last, but not in one piece
        arena.drop(slot)
        put(arena, slot, rows_of(rank))
    assert before == (arena.generation, arena.a.data_ptr(), arena.b.data_ptr(), arena.spans.data_ptr())
    arena.drop(1)
    put(arena, 1, rows_of(40))
    assert arena.generation > before[0] and arena.rank == 64


def test_slots_move() -> None:
    arena = Arena(BASE, 3, codes=False)
    held = [rows_of(rank) for rank in (2, 0, 3)]
    for slot, rows in enumerate(held):
        put(arena, slot, rows)
    arena.drop(1)
    arena.reserve_slots(5, torch.tensor([0, 2]))
    assert arena.spans[:, 1].tolist() == [2, 3, 0, 0, 0]
    for slot, rows in ((0, held[0]), (1, held[2])):
        assert torch.equal(arena.values(slot)[0], rows.a)
    arena.drop(1)
    put(arena, 4, held[2])
    assert torch.equal(arena.values(4)[1], held[2].b)


def blocks(dtype: torch.dtype) -> tuple[LowRankMatrix, Tensor]:
    """A change of three blocks: two of one ``a`` below each other, one of other columns; and the whole of it."""

    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, dtype=torch.float64)
        return (values * 40).clamp(-127, 127).to(torch.int8) if dtype == torch.int8 else values

    codes = dtype == torch.int8
    scale = [torch.rand(n) / 999 if codes else None for n in (2, 3)]
    a, other = draw(2, K), draw(3, 2)
    inputs = torch.rand(K) if codes else None
    outputs = torch.rand(F) if codes else None

    def rows(*at: int) -> Tensor | None:
        return None if outputs is None else outputs[slice(*at)]

    changes = (
        Change(a, draw(2, 2), scale[0], inputs, rows(0, 2), 0, 0),
        Change(a, draw(2, 2), scale[0], inputs, rows(4, 6), 4, 0),
        Change(other, draw(1, 3), scale[1], None if inputs is None else inputs[3:], rows(3, 4), 3, 3),
    )
    whole = torch.zeros(F, K, dtype=torch.float64)
    for c in changes:
        thin, tall = c.a.double(), c.b.double()
        tall = tall if c.scale is None else tall * c.scale.double()
        thin = thin if c.inputs is None else thin * c.inputs.double()
        tall = tall if c.outputs is None else tall * c.outputs.double()[:, None]
        whole[c.row : c.row + len(tall), c.column : c.column + thin.shape[1]] += tall @ thin
    return LowRankMatrix(BASE, changes), whole


def test_changes_of_blocks_are_one_change_of_the_whole() -> None:
    matrix, whole = blocks(torch.float64)
    rows = ArenaRows.of(matrix, torch.float64)
    assert rows.rank == 5, "blocks with one a share its rows"
    torch.testing.assert_close(rows.b.T @ rows.a, whole, rtol=1e-12, atol=1e-12)
    assert ArenaRows.codes(matrix) is None


def test_codes_stay_codes_where_shared_vectors_agree() -> None:
    matrix, whole = blocks(torch.int8)
    rows = ArenaRows.codes(matrix)
    assert rows is not None and rows.a.dtype == rows.b.dtype == torch.int8 and rows.rank == 5
    arena = Arena(BASE, 2, codes=True)
    put(arena, 1, rows)
    a, b = arena.values(1)
    torch.testing.assert_close(b.T @ a, whole, rtol=1e-6, atol=1e-9)
    floats = ArenaRows.of(matrix, torch.float64)
    torch.testing.assert_close(floats.b.T @ floats.a, whole, rtol=1e-6, atol=1e-9)
    other, _ = blocks(torch.int8)
    codes = ArenaRows.codes(other)
    assert codes is not None and not arena.accept(codes), "another γ"
    assert not arena.accept(floats)


def test_codes_whose_vectors_contradict_each_other_become_numbers() -> None:
    a, b, scale = torch.ones(1, K, dtype=torch.int8), torch.ones(F, 1, dtype=torch.int8), torch.ones(1)
    two = [Change(a.clone(), b, scale, torch.full((K,), v)) for v in (1.0, 2.0)]  # branches with norms of their own
    assert ArenaRows.codes(LowRankMatrix(BASE, tuple(two))) is None
    floats = ArenaRows.of(LowRankMatrix(BASE, tuple(two)), torch.float64)
    assert torch.equal(floats.b.T @ floats.a, torch.full((F, K), 3.0, dtype=torch.float64))


def test_an_arena_grows_by_no_more_than_it_must_where_memory_is_counted() -> None:
    arena = Arena(BASE, 3, codes=False)
    put(arena, 0, rows_of(32), exact=True)
    put(arena, 1, rows_of(33), exact=True)
    assert arena.capacity == 65
    with pytest.raises(ValueError, match="65 rows are in use and `size` is 64"):
        arena.resize(64)
