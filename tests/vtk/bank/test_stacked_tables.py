"""Embedding tables on a device, whole and of low rank, of several sizes: what a call gathers is what was put there."""

import itertools
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vtk.bank.layout import Bucket, Part, lay_out
from vtk.bank.stacked_tables import StackedTables, add_changes
from vtk.bank.tables import LowRankTable, Table
from vtk.models.packed.low_rank import Change

C, PREFIX = 5, 2
BASES = {n: torch.randn(n, C, dtype=torch.float64) for n in (3, 8, 90)}


def low(size: int, rank: int) -> LowRankTable:
    a, b = torch.randn(rank, C, dtype=torch.float64), torch.randn(size - PREFIX, rank, dtype=torch.float64)
    return LowRankTable(BASES[size], torch.randn(PREFIX, C, dtype=torch.float64), Change(a, b))


def values(table: Table) -> Tensor:
    if isinstance(table, Tensor):
        return table
    change = torch.einsum("nr,rc->nc", table.change.b, table.change.a)
    return torch.cat([table.prefix, table.base[PREFIX:] + change])


def gathered(tables: StackedTables, order: list[str], held: dict[str, Table], images: int) -> list[Tensor]:
    """What a call embeds: the tasks' rows in this order, of so many images each, with spare rows behind them."""
    call = tables.of_call()
    parts = tuple(
        Part(i, images, len(held[n]), table=call.first[n], prefix=call.prefix.get(n), table_slot=call.slot.get(n))
        for i, n in enumerate(order)
    )  # fmt: skip
    layout = lay_out(parts, Bucket.exact(parts).up())
    at = layout.views(layout.values)
    rows = call.rows.index_select(0, at["table_row"])
    if layout.bucket.tables:
        assert call.factors is not None
        add_changes(rows, call.factors, at["place"], at["table_slot"], at["thin_table"])
    ends = np.cumsum([0, *(images * p.tokens for p in parts)])
    return [rows[i:j] for i, j in itertools.pairwise(ends)]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from([3, 8, 90]), st.integers(-1, 4)), max_size=14))
def test_calls_gather_each_tasks_own_table(steps: list[tuple[int, int, int]]) -> None:
    tables, held = StackedTables(torch.device("cpu"), BASES[3]), dict[str, Table]()
    for key, size, rank in steps:
        name = str(key)
        if name in held:
            tables.remove(name)
            del held[name]
        else:
            held[name] = BASES[size].clone() if rank < 0 else low(size, rank)
            tables.add(name, held[name])
        order = sorted(held, key=hash)
        for found, task in zip(gathered(tables, order, held, 2) if order else [], order, strict=True):
            torch.testing.assert_close(found, values(held[task]).repeat(2, 1), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(values(tables.table(task)), values(held[task]), rtol=1e-12, atol=1e-12)


def test_low_rank_tables_take_their_factors_bytes(make_lab: Any) -> None:
    lab = make_lab()
    packs = {str(i): lab.factors(str(i), ranks=(2,), seed=i) for i in range(3)}
    bank = lab.bank(packs, kernels=True, dtype=torch.float32)
    ends = bank._state.ends
    assert sorted(ends.of_call(list(packs)).low_rank.slot.values()) == [0, 1, 2]
    table = 4 * (32 + 2 * 32 + 2 * 16)  # a class token, a of rank 2, and b of 16 patches
    assert ends.own_bytes("1") == table + 4 * 16 * 33
    bank.remove("0")
    bank.add("0", packs["0"])
    whole = lab.bank({"0": lab.pack("w")}, kernels=True, dtype=torch.float32)
    assert whole._state.ends.of_call(["0"]).low_rank.factors is None
