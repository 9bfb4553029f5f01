"""Embedding tables of all tasks in one tensor on a device, low-rank ones as rows of the base's table and thin factors.

A low-rank table is the base's of its size, with rows before the patches of its own, and a change b · a of the patches'
rows. A call gathers the base's rows, and adds the change as `grouped_low_rank` does: its x is, for each row, a one at
the row's place among the patches, so that z are the rows of b.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vtk.bank.arena_rows import ArenaRows
from vtk.bank.arenas import Arena
from vtk.bank.folded import n_bytes
from vtk.bank.grouped_weights import Factored
from vtk.bank.row_arena import RowArena
from vtk.bank.slot_stacks import release
from vtk.bank.tables import LowRankTable, Table
from vtk.models.packed.low_rank import Change
from vtk.models.weights.base import tensor_hash
from vtk_kernels.grouped_low_rank import grouped_low_rank

_PLACES, _SLOTS = 16, 64
"""Places of patches, and slots of low-rank tables, are added in these."""


@dataclass(frozen=True)
class CallTables:
    """Tables as calls read them.

    Attributes:
        rows: (rows of all tables, C).
        first: first row of each task's table, or of the base's.
        prefix: of tasks with low-rank tables, their own rows before the patches: first row, number.
        slot: of their factors.
        factors: of all of them; None where there are none.
    """

    rows: Tensor
    first: Mapping[str, int]
    prefix: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    slot: Mapping[str, int] = field(default_factory=dict)
    factors: Factored | None = None


class StackedTables:
    """Tables of all tasks; changed in place, between calls."""

    def __init__(self, device: torch.device, like: Table) -> None:
        table = like if isinstance(like, Tensor) else like.base
        self.rows = RowArena(tuple(table.shape[1:]), table.dtype, device)
        self._blocks: dict[str, int] = {}  # hash: block
        self._uses: dict[str, int] = {}
        self._table_of: dict[str, str] = {}  # task: hash
        self._low: dict[str, tuple[int, int, Tensor]] = {}  # task: block of prefix rows, slot, the base's table
        self._hashes: dict[int, tuple[Tensor, str]] = {}
        self._arena: Arena | None = None
        self._places = 0

    def __len__(self) -> int:
        return len(self._table_of)

    def add(self, name: str, table: Table) -> None:
        """Write a task's table; equal ones, and those of the base, are held once."""
        whole = table if isinstance(table, Tensor) else table.base
        key = self._table_of[name] = self._hash(whole, keep=not isinstance(table, Tensor))
        if key not in self._blocks:
            self._blocks[key] = self.rows.add(whole)
        self._uses[key] = self._uses.get(key, 0) + 1
        if isinstance(table, LowRankTable):
            taken = {slot for _, slot, _ in self._low.values()}
            slot = next(i for i in range(len(taken) + 1) if i not in taken)
            self._low[name] = self.rows.add(table.prefix), slot, table.base
            a, b = table.change.values(table.base.dtype)
            arena = self._arena_of(len(b), slot)
            places = b.new_zeros(len(a), self._places)
            places[:, : len(b)] = b.T
            rows = ArenaRows(places, a)
            arena.accept(rows)
            arena.reserve(slot, len(a))
            arena.write(slot, rows)

    def remove(self, name: str) -> None:
        """Free a task's rows."""
        key = self._table_of.pop(name)
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self.rows.drop(self._blocks.pop(key))
        if name in self._low:
            block, slot, _ = self._low.pop(name)
            self.rows.drop(block)
            assert self._arena is not None
            self._arena.drop(slot)
        if not self._low and self._arena is not None:
            release(*self._arena.tensors())
            self._arena, self._places, self._hashes = None, 0, {}

    def table(self, name: str) -> Table:
        """Return a copy of a task's table."""
        if name not in self._low:
            return self.rows.block(self._blocks[self._table_of[name]]).clone()
        block, slot, base = self._low[name]
        assert self._arena is not None
        prefix = self.rows.block(block).cpu()
        places, a = (t.cpu().clone() for t in self._arena.values(slot))
        return LowRankTable(base, prefix.clone(), Change(a, places[:, : len(base) - len(prefix)].T.contiguous()))

    def of_call(self) -> CallTables:
        """Return all tables."""
        first = {name: self.rows.first(self._blocks[key]) for name, key in self._table_of.items()}
        if not self._low or self._arena is None:
            return CallTables(self.rows.rows, first)
        prefix = {name: (self.rows.first(b), len(self.rows.block(b))) for name, (b, _, _) in self._low.items()}
        slots = {name: slot for name, (_, slot, _) in self._low.items()}
        return CallTables(self.rows.rows, first, prefix, slots, Factored.of(self._arena))

    def own_bytes(self, name: str) -> int:
        """Return the bytes of what only this task has."""
        key, found = self._table_of[name], 0
        if self._uses[key] == 1 and name not in self._low:
            found += self.rows.block(self._blocks[key]).nbytes
        if name in self._low and self._arena is not None:
            block, slot, _ = self._low[name]
            found += self.rows.block(block).nbytes + self._arena.rank_of(slot) * self._arena.row_bytes
        return found

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        arena = self._arena
        return [self.rows.rows, *([] if arena is None else arena.tensors())]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, free rows too."""
        return n_bytes(self.tensors())

    def _hash(self, table: Tensor, *, keep: bool) -> str:
        """Return the hash of a table; of the base's, which comes with every task, known from the first one."""
        if id(table) in self._hashes:
            return self._hashes[id(table)][1]
        found = tensor_hash(table)
        if keep:
            self._hashes[id(table)] = table, found
        return found

    def _arena_of(self, places: int, slot: int) -> Arena:
        """Return the arena with room for so many places of patches and this slot."""
        old, slots = self._arena, (slot // _SLOTS + 1) * _SLOTS
        if old is None or places > self._places:
            self._places = -(-places // _PLACES) * _PLACES
            like = self.rows.rows.new_empty(self.rows.rows.shape[1], self._places)
            new = self._arena = Arena(like, max(slots, 0 if old is None else len(old.spans)), codes=False)
            for _, at, _ in self._low.values():
                if old is not None and at != slot:  # that of the task that comes
                    a, b = old.values(at)
                    wider = a.new_zeros(len(a), self._places)
                    wider[:, : a.shape[1]] = a
                    new.reserve(at, len(a))
                    new.write(at, ArenaRows(wider, b))
            release(*([] if old is None else old.tensors()))
        elif slots > len(old.spans):
            old.reserve_slots(slots)
        assert self._arena is not None
        return self._arena


def add_changes(table: Tensor, factors: Factored, place: Tensor, slots: Tensor, tile_map: Tensor) -> None:
    """Add to gathered rows of base tables their tasks' changes, in place.

    Args:
        table: (T, C).
        factors: of `CallTables`.
        place: (T,) int32, of each row among the patches; −1 for others.
        slots: (P,) int32, of the groups of ``tile_map``.
        tile_map: (3, tiles), of the rows of tasks with low-rank tables.
    """
    places = torch.arange(factors.a.shape[1], dtype=torch.int32, device=table.device)
    x = (place[:, None] == places).to(table.dtype)
    spans = factors.spans.index_select(0, slots)
    grouped_low_rank(table, x, factors.a, factors.b, spans, tile_map, factors.rank)
