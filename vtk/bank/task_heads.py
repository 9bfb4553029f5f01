"""Position tables and classifiers of the tasks of a folded bank, and those of one call as its products read them.

`HeldEnds` keeps each task's own tensors, for loops over tasks; `StackedEnds` concatenates them, so that a few kernels
serve every mix of tasks. Equal tables are held once: without learned positions (DINOv3) tasks of one image size have
the same.
"""

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.bank.folded import Piece, n_bytes
from vtk.bank.row_arena import RowArena
from vtk.bank.stacked_tables import CallTables, StackedTables
from vtk.bank.tables import LowRankTable, Table, table_tensors, whole_table
from vtk.models.packed.products import Stack
from vtk.models.weights.base import tensor_hash

_WIDE = 1024
"""Above it the width is rounded up to a multiple of it, below to a power of two, at least `_NARROW`."""
_NARROW = 16


@dataclass(frozen=True)
class Heads:
    """Classifiers of one width: w (E, width, C) and b (E, width)."""

    w: Stack
    b: Stack

    @property
    def width(self) -> int:
        """Columns of their logits."""
        return int(self.b[0].shape[0])


@dataclass(frozen=True)
class CallEnds:
    """Tables and classifiers as one call reads them.

    Attributes:
        table: (rows of all tables, C); None if tasks embed their own images.
        table_at: first row of each task.
        heads: by width, ascending.
        head_at: of each task, the index in ``heads`` and the place in that stack.
        classes: of each task.
        low_rank: where changes of the base's tables are, beside ``table``; None of tables that are whole.
    """

    table: Tensor | None
    table_at: Mapping[str, int]
    heads: tuple[Heads, ...]
    head_at: Mapping[str, tuple[int, int]]
    classes: Mapping[str, int]
    low_rank: CallTables | None = None


class Ends(abc.ABC):
    """Tables and classifiers of all tasks."""

    @abc.abstractmethod
    def add(self, name: str, piece: Piece) -> "Ends":
        """Return these and those of a new task."""

    @abc.abstractmethod
    def remove(self, name: str) -> "Ends":
        """Return these without a task's."""

    @abc.abstractmethod
    def piece(self, name: str) -> Piece | None:
        """Return a task's table and classifier, which later changes leave as they are; None for no such task."""

    @abc.abstractmethod
    def of_call(self, names: Sequence[str]) -> CallEnds:
        """Return those of the tasks of a call."""

    @abc.abstractmethod
    def own_bytes(self, name: str) -> int:
        """Return the bytes of a task's classifier, and of its table where no other task has it."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes of all tensors, without the base's tables that changes refer to."""

    @abc.abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return all tensors."""


@dataclass(frozen=True)
class HeldEnds(Ends):
    """Each task's own tensors; immutable.

    Attributes:
        device: of the bank.
        pieces: of each task.
        tables: whole tables by their hash.
        uses: how many tasks have each.
        table_of: hash of each task's table; tasks with a low-rank one have none.
    """

    device: torch.device
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    uses: Mapping[str, int] = field(default_factory=dict)
    table_of: Mapping[str, str] = field(default_factory=dict)
    held: int = 0

    def add(self, name: str, piece: Piece) -> "HeldEnds":
        """Return these and those of a new task."""
        tables, uses, table_of, held = dict(self.tables), dict(self.uses), dict(self.table_of), self.held
        table: Table | None = piece.table
        if isinstance(table, Tensor):
            key = table_of[name] = tensor_hash(table)
            if key not in tables:
                tables[key] = table.to(self.device)
                held += table.nbytes
            table, uses[key] = tables[key], uses.get(key, 0) + 1
        elif table is not None:
            table = table.to(self.device)
            held += n_bytes(table.own())
        w, b = (None if t is None else t.to(self.device) for t in (piece.w_head, piece.b_head))
        held += n_bytes([t for t in (w, b) if t is not None])
        return HeldEnds(self.device, {**self.pieces, name: Piece(table, w, b)}, tables, uses, table_of, held)

    def remove(self, name: str) -> "HeldEnds":
        """Return these without a task's."""
        tables, uses, held = dict(self.tables), dict(self.uses), self.held - self.own_bytes(name)
        if (key := self.table_of.get(name)) is not None:
            uses[key] -= 1
            if not uses[key]:
                del uses[key], tables[key]
        pieces = {n: p for n, p in self.pieces.items() if n != name}
        return replace(
            self, pieces=pieces, tables=tables, uses=uses, held=held,
            table_of={n: k for n, k in self.table_of.items() if n != name},
        )  # fmt: skip

    def piece(self, name: str) -> Piece | None:
        """Return a task's table and classifier; None for no such task."""
        return self.pieces.get(name)

    def of_call(self, names: Sequence[str]) -> CallEnds:
        """Return those of the tasks of a call, tables one after the other, classifiers of one size together."""
        pieces = {name: self.pieces[name] for name in names}
        starts, rows, found = dict[str, int](), 0, list[Tensor]()
        at = dict[object, int]()
        for name, piece in pieces.items():
            if piece.table is None:
                continue
            key = self.table_of.get(name, name)
            if key not in at:
                at[key], rows = rows, rows + len(piece.table)
                found.append(whole_table(piece.table))
            starts[name] = at[key]
        table = None if not found else found[0] if len(found) == 1 else torch.cat(found)
        sizes = {name: len(p.w_head) for name, p in pieces.items() if p.w_head is not None}
        heads, head_at = list[Heads](), dict[str, tuple[int, int]]()
        for size in sorted(set(sizes.values())):
            same = [name for name, n in sizes.items() if n == size]
            head_at |= {name: (len(heads), i) for i, name in enumerate(same)}
            w, b = ([t for n in same if (t := getattr(pieces[n], part)) is not None] for part in ("w_head", "b_head"))
            heads.append(Heads(w, b))
        return CallEnds(table, starts, tuple(heads), head_at, sizes)

    def own_bytes(self, name: str) -> int:
        """Return the bytes of a task's classifier, and of its table where no other task has it."""
        piece, key = self.pieces[name], self.table_of.get(name)
        alone = piece.table is not None and (key is None or self.uses[key] == 1)
        table = table_tensors(piece.table) if alone and piece.table is not None else []
        return n_bytes([*table, *(t for t in (piece.w_head, piece.b_head) if t is not None)])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without the base's tables that changes refer to."""
        return self.held

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        low = [t for p in self.pieces.values() if isinstance(p.table, LowRankTable) for t in p.table.own()]
        heads = [t for p in self.pieces.values() for t in (p.w_head, p.b_head) if t is not None]
        return [*self.tables.values(), *low, *heads]


class StackedEnds(Ends):
    """All tables in one tensor, and classifiers padded to a few widths; changed in place, between calls.

    A loop over tasks would launch several kernels for each; with many tasks of one image each that takes longer than
    the blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables: StackedTables | None = None
        self._heads: dict[int, tuple[RowArena, RowArena]] = {}
        self._places: dict[str, tuple[int, int, int]] = {}  # task: width, blocks of w and b
        self._classes: dict[str, int] = {}
        self._names: dict[str, bool] = {}  # whether it has a table
        self._ready: CallEnds | None = None

    def add(self, name: str, piece: Piece) -> "StackedEnds":
        """Write a task's tables and classifier."""
        self._ready = None
        self._names[name] = piece.table is not None
        if piece.table is not None:
            self._tables = self._tables or StackedTables(self.device, piece.table)
            self._tables.add(name, piece.table)
        if piece.w_head is not None and piece.b_head is not None:
            width = padded_classes(len(piece.w_head))
            parts = [_pad(t, width)[None] for t in (piece.w_head, piece.b_head)]
            if width not in self._heads:
                w, b = (RowArena(tuple(t.shape[1:]), t.dtype, self.device) for t in parts)
                self._heads[width] = (w, b)
            first, second = (arena.add(t) for arena, t in zip(self._heads[width], parts, strict=True))
            self._places[name] = (width, first, second)
            self._classes[name] = len(piece.w_head)
        return self

    def remove(self, name: str) -> "StackedEnds":
        """Free a task's rows."""
        self._ready = None
        if self._names.pop(name, False) and self._tables is not None:
            self._tables.remove(name)
            self._tables = self._tables if len(self._tables) else None
        if name in self._places:
            width, *keys = self._places.pop(name)
            del self._classes[name]
            for arena, block in zip(self._heads[width], keys, strict=True):
                arena.drop(block)
            if not len(self._heads[width][0]):
                del self._heads[width]
        return self

    @property
    def table(self) -> Tensor | None:
        """All tables, one after the other; None if tasks embed their own images."""
        return None if self._tables is None else self._tables.rows.rows

    def piece(self, name: str) -> Piece | None:
        """Return copies of a task's table and classifier; None for no such task."""
        if name not in self._names:
            return None
        w, b = None, None
        table = self._tables.table(name) if self._names[name] and self._tables is not None else None
        if name in self._places:
            width, *keys = self._places[name]
            w, b = (arena.block(k)[0, : self._classes[name]].clone()
                    for arena, k in zip(self._heads[width], keys, strict=True))  # fmt: skip
        return Piece(table, w, b)

    def of_call(self, names: Sequence[str]) -> CallEnds:
        """Return those of all tasks."""
        if self._ready is None:
            widths = sorted(self._heads)
            heads = tuple(Heads(self._heads[w][0].rows, self._heads[w][1].rows) for w in widths)
            head_at = {
                n: (widths.index(w), self._heads[w][0].first(key)) for n, (w, key, _) in self._places.items()
            }  # fmt: skip
            tables = None if self._tables is None else self._tables.of_call()
            self._ready = CallEnds(
                None if tables is None else tables.rows, {} if tables is None else tables.first, heads, head_at,
                dict(self._classes), tables,
            )  # fmt: skip
        return self._ready

    def own_bytes(self, name: str) -> int:
        """Return the bytes of a task's padded classifier, and of its table where no other task has it."""
        found = self._tables.own_bytes(name) if self._names.get(name) and self._tables is not None else 0
        if name in self._places:
            found += sum(arena.row_bytes for arena in self._heads[self._places[name][0]])
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, free rows too."""
        return n_bytes(self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        arenas: Iterable[RowArena] = (arena for pair in self._heads.values() for arena in pair)
        return [*([] if self._tables is None else self._tables.tensors()), *(arena.rows for arena in arenas)]


def padded_classes(classes: int) -> int:
    """Return the padded width of a classifier."""
    if classes > _WIDE:
        return -(-classes // _WIDE) * _WIDE
    return max(_NARROW, 1 << (classes - 1).bit_length())


def _pad(value: Tensor, width: int) -> Tensor:
    return F.pad(value, (0, 0) * (value.ndim - 1) + (0, width - len(value)))
