"""Concatenates the tasks' position tables and classifiers, so that a few products serve every mix of tasks.

A loop over tasks would launch several kernels for each; with many tasks of one image each that takes longer than the
blocks. Classifiers of similar sizes are padded to one width and stacked.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.bank.folded import Piece

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
        table: (rows of all tasks, C); None if tasks embed their own images.
        table_at: first row of each task.
        heads: by width, ascending.
        head_at: of each task, the index in ``heads`` and the place in that stack.
        pieces: of each task; views of the above.
    """

    table: Tensor | None
    table_at: Mapping[str, int]
    heads: tuple[Heads, ...]
    head_at: Mapping[str, tuple[int, int]]
    pieces: Mapping[str, Piece]

    @classmethod
    def of(cls, pieces: Mapping[str, Piece], device: torch.device) -> "Ends":
        """Concatenate the tasks' tables and classifiers on a device."""
        tables = {n: p.table.to(device) for n, p in pieces.items() if p.table is not None}
        starts, row = {}, 0
        for name, table in tables.items():
            starts[name], row = row, row + len(table)
        arena = torch.cat(list(tables.values())) if tables else None
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
        return cls(arena, starts, tuple(heads), head_at, views)

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        return [*([] if self.table is None else [self.table]), *(t for h in self.heads for t in (h.w, h.b))]


def piece_bytes(piece: Piece) -> int:
    """Return the bytes of a task's table and padded classifier."""
    values = 0 if piece.table is None else piece.table.numel()
    if piece.w_head is not None:
        values += padded_classes(len(piece.w_head)) * (piece.w_head.shape[1] + 1)
    some = piece.table if piece.table is not None else piece.w_head
    return 0 if some is None else values * some.element_size()


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
