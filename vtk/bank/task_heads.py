"""Concatenates the tasks' position tables and classifiers, so that a few products serve every mix of tasks.

A loop over tasks would launch several kernels for each; with many tasks of one image each that takes longer than the
blocks. Classifiers of similar sizes are padded to one width and stacked. Equal tables are held once: without learned
positions (DINOv3) tasks of one image size have the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.bank.folded import Piece
from vtk.models.weights.base import tensor_hash

_WIDE = 1024
"""Above it the width is rounded up to a multiple of it, below to a power of two, at least `_NARROW`."""
_NARROW = 16


@dataclass(frozen=True)
class Heads:
    """Classifiers padded to one width.

    Attributes:
        w: (E, width, C).
        b: (E, width).
    """

    w: Tensor
    b: Tensor


@dataclass(frozen=True)
class Ends:
    """Position tables and classifiers of all tasks; immutable, replaced as a whole when tasks are added or removed.

    Attributes:
        table: (rows of all tables, C); None if tasks embed their own images.
        table_at: first row of each task.
        table_of: hash of each task's table.
        heads: by width, ascending.
        head_at: of each task, the index in ``heads`` and the place in that stack.
        pieces: of each task; views of the above.
    """

    table: Tensor | None
    table_at: Mapping[str, int]
    table_of: Mapping[str, str]
    heads: tuple[Heads, ...]
    head_at: Mapping[str, tuple[int, int]]
    pieces: Mapping[str, Piece]

    @classmethod
    def of(cls, pieces: Mapping[str, Piece], device: torch.device, hashes: Mapping[str, str] | None = None) -> "Ends":
        """Concatenate the tasks' tables and classifiers on a device.

        Args:
            pieces: of each task.
            device: of the bank.
            hashes: of the tables of tasks, where they are known.
        """
        known = hashes or {}
        tables = {n: p.table for n, p in pieces.items() if p.table is not None}
        table_of = {n: known[n] if n in known else tensor_hash(table) for n, table in tables.items()}
        firsts: dict[str, int] = {}
        row, found = 0, []
        for name, table in tables.items():
            if table_of[name] not in firsts:
                firsts[table_of[name]], row = row, row + len(table)
                found.append(table.to(device))
        starts = {n: firsts[key] for n, key in table_of.items()}
        arena = torch.cat(found) if found else None
        widths = {n: padded_classes(len(p.w_head)) for n, p in pieces.items() if p.w_head is not None}
        heads: list[Heads] = []
        head_at: dict[str, tuple[int, int]] = {}
        for width in sorted(set(widths.values())):
            names = [n for n, w in widths.items() if w == width]
            head_at |= {n: (len(heads), i) for i, n in enumerate(names)}
            heads.append(Heads(*(torch.stack([_pad(pieces[n], i, width, device) for n in names]) for i in (0, 1))))
        views = {}
        for name, piece in pieces.items():
            rows, w, b = piece.table, piece.w_head, piece.b_head
            if rows is not None and arena is not None:
                rows = arena[starts[name] : starts[name] + len(rows)]
            if w is not None:
                (which, place), classes = head_at[name], len(w)
                w, b = heads[which].w[place, :classes], heads[which].b[place, :classes]
            views[name] = Piece(rows, w, b)
        return cls(arena, starts, table_of, tuple(heads), head_at, views)

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        return [*([] if self.table is None else [self.table]), *(t for h in self.heads for t in (h.w, h.b))]

    def own_bytes(self, name: str) -> int:
        """Return the bytes of a task's padded classifier, and of its table where no other task has it."""
        piece, found = self.pieces[name], 0
        if piece.table is not None and list(self.table_of.values()).count(self.table_of[name]) == 1:
            found += piece.table.numel() * piece.table.element_size()
        if piece.w_head is not None:
            width, channels = padded_classes(len(piece.w_head)), piece.w_head.shape[1]
            found += width * (channels + 1) * piece.w_head.element_size()
        return found


def padded_classes(classes: int) -> int:
    """Return the padded width of a classifier."""
    if classes > _WIDE:
        return -(-classes // _WIDE) * _WIDE
    return max(_NARROW, 1 << (classes - 1).bit_length())


def _pad(piece: Piece, part: int, width: int, device: torch.device) -> Tensor:
    value = (piece.w_head, piece.b_head)[part]
    assert value is not None
    spare = width - len(value)
    return F.pad(value.to(device), (0, 0) * (value.ndim - 1) + (0, spare))
