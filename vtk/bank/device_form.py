"""A task's attention weights in the form that a device store copies: whole matrices, or the rows of arenas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vtk.bank.arena_rows import ArenaRows
from vtk.bank.folded import Weights, merge, n_bytes
from vtk.models.packed.low_rank import LowRankMatrix

Parts = Sequence[Mapping[str, Tensor]]

MATRICES = ("qkv.weight", "proj.weight", "gate.weight")
"""Names of matrices among a task's weights."""

SPAN = 16
"""Bytes of a matrix's spans, one in the arena of each type; there may be one type alone."""


@dataclass(frozen=True, eq=False)
class WholeForm:
    """Whole matrices, biases and norms, layer by layer."""

    parts: Parts

    @property
    def nbytes(self) -> int:
        """Bytes of a slot."""
        return n_bytes([t for part in self.parts for t in part.values()])


@dataclass(frozen=True, eq=False)
class ThinForm:
    """Factors, layer by layer, beside biases and norms.

    Attributes:
        parts: biases and norms.
        rows: factors of each matrix; of rank 0 without any.
        matrices: number of matrices, those without factors too.
    """

    parts: Parts
    rows: Sequence[Mapping[str, ArenaRows]]
    matrices: int

    @property
    def nbytes(self) -> int:
        """Bytes of a slot, its spans, and the arenas' rows."""
        factors = sum(rows.nbytes for part in self.rows for rows in part.values())
        return factors + SPAN * self.matrices + n_bytes([t for part in self.parts for t in part.values()])


def is_thin(weights: Weights) -> bool:
    """Return whether all matrices are changes of the base's, as arenas hold them.

    A task of which some matrices are whole, or whose inputs have factors of their own (EVA-02's norm before the
    projection), is merged: one map of tiles serves all products of a call.
    """
    matrices = [t for part in weights for t in part.values() if isinstance(t, LowRankMatrix)]
    whole = any(isinstance(part[key], Tensor) for part in weights for key in part if key in MATRICES)
    return bool(matrices) and not whole and all(m.inputs is None for m in matrices)


def whole_form(weights: Weights) -> WholeForm:
    """Return a task's weights with every change added to its matrix."""
    return WholeForm([{k: t.cpu() for k, t in part.items()} for part in merge(weights)])


def small_parts(weights: Weights) -> list[dict[str, Tensor]]:
    """Return a task's biases and norms."""
    return [{k: t for k, t in part.items() if isinstance(t, Tensor) and k not in MATRICES} for part in weights]


def pinned(form: WholeForm | ThinForm) -> WholeForm | ThinForm:
    """Return a form whose tensors are views of one piece of pinned memory: a copy to the device does not wait."""
    tensors = [t for part in form.parts for t in part.values()]
    if isinstance(form, ThinForm):
        tensors += [t for part in form.rows for r in part.values() for t in (r.a, r.b, r.scale) if t is not None]
    sizes = [-(-t.nbytes // 16) * 16 for t in tensors]
    memory, first, moved = torch.empty(sum(sizes), dtype=torch.uint8).pin_memory(), 0, dict[int, Tensor]()
    for tensor, size in zip(tensors, sizes, strict=True):
        view = memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        moved[id(tensor)], first = view.copy_(tensor), first + size
    parts = [{k: moved[id(t)] for k, t in part.items()} for part in form.parts]
    if isinstance(form, WholeForm):
        return WholeForm(parts)

    def move(r: ArenaRows) -> ArenaRows:
        scale = None if r.scale is None else moved[id(r.scale)]
        return ArenaRows(moved[id(r.a)], moved[id(r.b)], scale, r.x_scale, r.y_scale)

    return ThinForm(parts, [{k: move(r) for k, r in part.items()} for part in form.rows], form.matrices)
