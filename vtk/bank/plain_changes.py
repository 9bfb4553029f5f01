"""A pack's tensors of one attention module in the form of `own_weights`, matrices as changes where it has factors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vtk.models.packed.low_rank import Change, LowRankMatrix, Matrix
from vtk.models.packed.structure import MATRICES, PROJECTIONS, Heads, own_parameters, small_weights
from vtk.packs.factors import Factors


@dataclass(frozen=True, eq=False)
class RowChange:
    """Factors of the rows of a matrix from ``row`` on: of all of qkv, or of its q, k or v."""

    row: int
    factors: Factors


Plain = Mapping[str, Tensor | tuple[RowChange, ...] | None]
"""By the names of `own_weights`: a task's own tensor; or the changes of the base's matrix, none where it is the base's;
or None for a matrix of which some rows are the task's own and others are not."""


@dataclass(frozen=True, eq=False)
class Module:
    """An attention module of the base.

    Attributes:
        name: in the model.
        heads: of it.
        matrices: of each matrix of `own_weights`, the parameters whose rows it has, and the first row of each.
        small: all other parameters that belong to a task, in fp32.
    """

    name: str
    heads: Heads
    matrices: Mapping[str, tuple[tuple[str, int], ...]]
    small: Mapping[str, Tensor]

    @classmethod
    def of(cls, name: str, attn: Any) -> "Module":
        """Read an attention module of timm."""
        own, heads = own_parameters(attn), Heads.of(attn)
        matrices: dict[str, tuple[tuple[str, int], ...]] = {key: ((key, 0),) for key in MATRICES if key in own}
        if attn.qkv is None:
            starts = (0, heads.widths[0], heads.widths[0] + heads.widths[1])
            names = (f"{p}.weight" for p in PROJECTIONS)
            matrices = {"qkv.weight": tuple(zip(names, starts, strict=True)), **matrices}
        taken = {part for parts in matrices.values() for part, _ in parts}
        small = {key: p.detach().clone() for key, p in own.items() if key not in taken}
        return cls(name, heads, matrices, small)

    def plain(self, dense: Mapping[str, Tensor], factors: Mapping[str, Factors]) -> dict[str, Any]:
        """Return a pack's `Plain` of this module.

        Args:
            dense: the pack's whole tensors, by their names in the model.
            factors: its changes.
        """
        own = {key: dense.get(f"{self.name}.{key}", t) for key, t in self.small.items()}
        found: dict[str, Any] = dict(small_weights(own, self.heads))
        for key, parts in self.matrices.items():
            names = [(f"{self.name}.{part}", row) for part, row in parts]
            if not any(name in dense for name, _ in names):
                changes = [(row, factors[name]) for name, row in names if name in factors]
                found[key] = tuple(RowChange(row, f) for row, f in changes if f.rank)
            else:
                found[key] = torch.cat([dense[n] for n, _ in names]) if all(n in dense for n, _ in names) else None
        return found


def to_change(
    factors: Factors, dtype: torch.dtype, *, row: int = 0, column: int = 0, inputs: Tensor | None = None,
    outputs: Tensor | None = None,
) -> Change:  # fmt: skip
    """Return factors as a `Change` in ``dtype``; int8 ones stay codes.

    Args:
        factors: of rank 1 or more.
        dtype: of the bank.
        row: of the matrix, where the block begins.
        column: likewise.
        inputs: factors of the columns, multiplied into ``a``, beside codes kept apart.
        outputs: factors of the rows, into ``b``, likewise.
    """
    wide = torch.promote_types(dtype, torch.float32)
    if factors.a_scale is not None and factors.b_scale is not None:
        scale = factors.a_scale.to(wide) * factors.b_scale.to(wide) * factors.scale
        return Change(factors.a, factors.b, scale, inputs, outputs, row, column)
    a, b = factors.values(wide)
    return Change(*Change(a, b, None, inputs, outputs).values(dtype), row=row, column=column)


def unfolded(plain: Plain, base: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Matrix]:
    """Return an attention's weights for timm's own blocks.

    Args:
        plain: none of it None.
        base: the base's matrices, in the bank's dtype.
        dtype: of the bank.
    """
    found: dict[str, Matrix] = {}
    for key, value in plain.items():
        if isinstance(value, Tensor):
            found[key] = value.to(dtype)
        else:
            assert value is not None
            found[key] = LowRankMatrix(base[key], tuple(to_change(c.factors, dtype, row=c.row) for c in value))
    return found
