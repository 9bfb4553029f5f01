"""Matrices of a task as the base's matrix and changes of low rank, kept apart: y = base·x + Σ b·(a·x).

The base's matrix is one tensor for all tasks, so rows of many tasks go through it as one product; a change is two thin
products more. Source: Hu et al. 2022 (LoRA), eq. 3; kept apart at inference as by Sheng et al. 2024 (S-LoRA).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Change:
    """A change b · a of a block of a matrix.

    Attributes:
        a: (r, k), floating point or int8.
        b: (f, r), likewise.
        scale: (r,) fp32 (fp64 for it), of the r components of an int8 change; None for 1.
        inputs: (k,), factors of the columns, such as the shared norm's; None for 1. Tasks share the tensor.
        outputs: (f,), factors of the rows, such as LayerScale; None for 1. Tasks share the tensor.
        row, column: of the matrix, where the block begins.
    """

    a: Tensor
    b: Tensor
    scale: Tensor | None = None
    inputs: Tensor | None = None
    outputs: Tensor | None = None
    row: int = 0
    column: int = 0

    @property
    def rank(self) -> int:
        """r."""
        return len(self.a)

    def reads_as(self, other: "Change") -> bool:
        """Return whether a·x is that of another change: changes of several blocks of rows may have one ``a``."""
        return self.a is other.a and self.inputs is other.inputs and self.column == other.column

    def values(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a (r, k) and b (f, r) in a floating type with all factors in them; the tensors themselves if they are.

        They are multiplied in fp32, or fp64 for it, and cast once.
        """
        if self.a.dtype == dtype and self.scale is None and self.inputs is None and self.outputs is None:
            return self.a, self.b
        wide = torch.promote_types(dtype, torch.float32)
        a, b = self.a.to(wide), self.b.to(wide)
        if self.scale is not None:
            b = b * self.scale.to(wide)
        if self.inputs is not None:
            a = a * self.inputs.to(wide)
        if self.outputs is not None:
            b = b * self.outputs.to(wide)[:, None]
        return a.to(dtype), b.to(dtype)

    def to(self, device: torch.device | str) -> "Change":
        """Return the change on a device; ``inputs`` and ``outputs`` are moved, too."""
        moved = [None if t is None else t.to(device) for t in (self.a, self.b, self.scale, self.inputs, self.outputs)]
        a, b, scale, inputs, outputs = moved
        assert a is not None and b is not None
        return Change(a, b, scale, inputs, outputs, self.row, self.column)


@dataclass(frozen=True, eq=False)
class LowRankMatrix:
    """A task's matrix (F, K): the base's and its changes; of rank 0 without one.

    Attributes:
        base: (F, K), of a floating type; the same tensor in all tasks that share it.
        changes: of blocks of it, those with one ``a`` next to each other.
        inputs: (K,), factors of x for this task, before base and changes; None for 1.
    """

    base: Tensor
    changes: tuple[Change, ...] = ()
    inputs: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """(F, K)."""
        return self.base.shape

    @property
    def rank(self) -> int:
        """Sum of the changes' ranks."""
        return sum(change.rank for change in self.changes)

    @functools.cached_property
    def thin(self) -> tuple[Tensor, Tensor] | None:
        """Transposes (K, r), (r, F) of its only change, if that is of all rows and columns and in its type; else None.

        They are made once: with few rows of a task, views take as long as products.
        """
        if len(self.changes) != 1:
            return None
        (change,) = self.changes
        plain = change.a.dtype == self.base.dtype and change.scale is change.inputs is change.outputs is None
        fits = (len(change.b), change.a.shape[1]) == tuple(self.shape)
        return (change.a.t(), change.b.t()) if plain and fits and change.rank else None

    def own(self) -> list[Tensor]:
        """Return the tensors that only this task has."""
        found = [t for c in self.changes for t in (c.a, c.b, c.scale) if t is not None]
        found += [] if self.inputs is None else [self.inputs]
        return list({id(t): t for t in found}.values())

    def merged(self) -> Tensor:
        """Return the whole matrix (F, K), computed in fp32 (fp64) and cast once."""
        wide = torch.promote_types(self.base.dtype, torch.float32)
        whole = self.base.to(wide, copy=True)
        for change in self.changes:
            a, b = change.values(wide)
            rows, columns = slice(change.row, change.row + len(b)), slice(change.column, change.column + a.shape[1])
            whole[rows, columns].addmm_(b, a)
        return (whole if self.inputs is None else whole * self.inputs.to(wide)).to(self.base.dtype)

    def stacked(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return all changes as one, a (R, K) and b (F, R), with zeros outside their blocks."""
        parts = [(c, *c.values(dtype)) for c in self.changes]
        a = self.base.new_zeros(self.rank, self.shape[1], dtype=dtype)
        b = self.base.new_zeros(self.shape[0], self.rank, dtype=dtype)
        first = 0
        for change, thin, tall in parts:
            last = first + change.rank
            a[first:last, change.column : change.column + thin.shape[1]] = thin
            b[change.row : change.row + len(tall), first:last] = tall
            first = last
        return a, b


Matrix = Tensor | LowRankMatrix


def whole(matrix: Matrix) -> Tensor:
    """Return a matrix (F, K) as one tensor."""
    return matrix.merged() if isinstance(matrix, LowRankMatrix) else matrix


def base_of(matrix: Matrix) -> Tensor:
    """Return the tensor whose product with x a matrix begins with."""
    return matrix.base if isinstance(matrix, LowRankMatrix) else matrix


def own_tensors(matrices: Sequence[Matrix]) -> list[Tensor]:
    """Return the tensors that only the task of these matrices has."""
    return [t for m in matrices for t in (m.own() if isinstance(m, LowRankMatrix) else [m])]
