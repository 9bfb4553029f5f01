"""Tables and classifiers of all tasks in a few tensors, which a few kernels read whatever the mix of tasks."""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.bank.folded import Piece, n_bytes
from vtk.bank.row_arena import RowArena
from vtk.bank.stacked_tables import StackedTables
from vtk.bank.task_heads import CallEnds, Ends, Heads

_WIDE = 1024
"""Above it the width is rounded up to a multiple of it, below to a power of two, at least `_NARROW`."""
_NARROW = 16


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
