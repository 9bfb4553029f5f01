"""The changes of a task's matrix as rows of an arena: a (r, K) and b (r, F), in the bank's dtype or as int8 codes.

Changes of blocks of a matrix become one change of all of it, with zeros outside their blocks; blocks that read one
``a`` share its rows. Codes keep the vectors that all tasks share beside them (γ of the norm in front, LayerScale).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vtk.models.packed.low_rank import Change, LowRankMatrix
from vtk_kernels.grouped_low_rank import UNIT


@dataclass(frozen=True, eq=False)
class ArenaRows:
    """Factors of one matrix (F, K) of one task.

    Attributes:
        a: (r, K).
        b: (r, F).
        scale: (r,) fp32 (fp64 for fp64), as `grouped_low_rank` takes it, of int8 codes; None otherwise.
        x_scale: (K,), shared factors of the columns of int8 codes, NaN where this task says nothing; None otherwise.
        y_scale: (F,), of the rows, likewise.
    """

    a: Tensor
    b: Tensor
    scale: Tensor | None = None
    x_scale: Tensor | None = None
    y_scale: Tensor | None = None

    @classmethod
    def of(cls, matrix: LowRankMatrix, dtype: torch.dtype) -> "ArenaRows":
        """Return the changes in a floating type."""
        groups = list(_reading_alike(matrix.changes))
        (features, size), rank = matrix.shape, sum(group[0].rank for group in groups)
        a, b, first = torch.zeros(rank, size, dtype=dtype), torch.zeros(rank, features, dtype=dtype), 0
        for group in groups:
            last = first + group[0].rank
            for change in group:
                thin, tall = change.values(dtype)
                a[first:last, change.column : change.column + thin.shape[1]] = thin
                b[first:last, change.row : change.row + len(tall)] += tall.T
            first = last
        return cls(a, b)

    @classmethod
    def codes(cls, matrix: LowRankMatrix) -> "ArenaRows | None":
        """Return int8 changes as codes; None where there are others, or their shared vectors contradict each other."""
        if not matrix.changes or any(c.a.dtype != torch.int8 or c.scale is None for c in matrix.changes):
            return None
        groups = list(_reading_alike(matrix.changes))
        (features, size), rank = matrix.shape, sum(group[0].rank for group in groups)
        a, b = torch.zeros(rank, size, dtype=torch.int8), torch.zeros(rank, features, dtype=torch.int8)
        scale, first = torch.zeros(rank, dtype=torch.promote_types(matrix.base.dtype, torch.float32)), 0
        x_scale, y_scale = torch.full((size,), torch.nan), torch.full((features,), torch.nan)
        for group in groups:
            last = first + group[0].rank
            for change in group:
                columns = slice(change.column, change.column + change.a.shape[1])
                rows = slice(change.row, change.row + len(change.b))
                inputs = torch.ones(change.a.shape[1]) if change.inputs is None else change.inputs.float()
                outputs = torch.ones(len(change.b)) if change.outputs is None else change.outputs.float()
                if not (_agree(x_scale[columns], inputs) and _agree(y_scale[rows], outputs)):
                    return None
                if not (change.scale is group[0].scale or torch.equal(change.scale, group[0].scale)):  # type: ignore[arg-type]
                    return None
                x_scale[columns], y_scale[rows] = inputs, outputs
                a[first:last, columns], b[first:last, rows] = change.a, change.b.T
                scale[first:last] = change.scale * UNIT**2  # type: ignore[operator]
            first = last
        return cls(a, b, scale, x_scale, y_scale)

    @property
    def rank(self) -> int:
        """r."""
        return len(self.a)

    @property
    def nbytes(self) -> int:
        """Bytes of what an arena holds of them."""
        return self.a.nbytes + self.b.nbytes + (0 if self.scale is None else self.scale.nbytes)


def _agree(known: Tensor, new: Tensor) -> bool:
    return bool((known.isnan() | (known == new)).all())


def _reading_alike(changes: Sequence[Change]) -> Iterator[list[Change]]:
    """Yield adjacent changes that have one ``a``, and different rows."""
    group: list[Change] = []
    for change in changes:
        if not change.rank:
            continue
        if group and not change.reads_as(group[0]):
            yield group
            group = []
        group.append(change)
    if group:
        yield group
