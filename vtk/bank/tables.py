"""Embedding tables of tasks whose position table is a low-rank change of the base's.

The base's table of an image size is held once. A task keeps two thin factors, and its rows before the patches whole.
"""

from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor

from vtk.bank.plain_changes import to_change
from vtk.fused.embed import Embedding
from vtk.models.packed.low_rank import Change
from vtk.packs.factors import Factors


@dataclass(frozen=True, eq=False)
class LowRankTable:
    """A task's embedding table (N, C), as of `Piece`.

    Attributes:
        base: (N, C), of the base; the same tensor in all tasks of an image size.
        prefix: (n, C), the task's rows before the patches.
        change: of the rows of patches, ``b`` (N - n, r).
    """

    base: Tensor
    prefix: Tensor
    change: Change

    def __len__(self) -> int:
        return len(self.base)

    def own(self) -> list[Tensor]:
        """Return the tensors that only this task has."""
        return [t for t in (self.prefix, self.change.a, self.change.b, self.change.scale) if t is not None]

    def whole(self) -> Tensor:
        """Return the table (N, C)."""
        n, dtype = len(self.prefix), self.base.dtype
        a, b = self.change.values(dtype)
        found = torch.empty_like(self.base)
        found[:n] = self.prefix
        torch.addmm(self.base[n:], b, a, out=found[n:])
        return found

    def to(self, device: torch.device) -> "LowRankTable":
        """Return the table on the device where ``base`` is."""
        return LowRankTable(self.base, self.prefix.to(device), self.change.to(device))


Table = Tensor | LowRankTable


def whole_table(table: Table) -> Tensor:
    """Return a table as one tensor (N, C)."""
    return table if isinstance(table, Tensor) else table.whole()


def table_tensors(table: Table) -> list[Tensor]:
    """Return the tensors of a table that only its task has, if no other has an equal one."""
    return [table] if isinstance(table, Tensor) else table.own()


def low_rank_table(base: Tensor, whole: Tensor, factors: Factors, embedding: Embedding, size: tuple[int, int]) -> Table:
    """Return a task's table as a change of the base's, or whole where that takes less.

    Args:
        base: (N, C), of the base, in the bank's dtype and on its device.
        whole: (N, C), of the task, likewise, on the CPU.
        factors: of ``pos_embed``.
        embedding: of the task's model.
        size: of its images in pixels, height first.
    """
    n = 0 if embedding.prefix is None else embedding.prefix.shape[1]
    part = Factors(factors.a, factors.b[embedding.own :].clone(), factors.scale, factors.a_scale, factors.b_scale)
    if not factors.rank:
        part = Factors(whole.new_empty(0, whole.shape[1]), whole.new_empty(len(whole) - n, 0))
    elif embedding.resampler is not None:
        return whole
    elif embedding.dynamic and (grid := _grid(embedding, size)) != embedding.grid:
        if whole.dtype == torch.float64:  # timm resamples in fp32
            return whole
        part = _resampled(factors, embedding, grid)
    found = LowRankTable(base, whole[:n].clone(), to_change(part, whole.dtype))
    return found if sum(t.nbytes for t in found.own()) < whole.nbytes else whole


def _grid(embedding: Embedding, size: tuple[int, int]) -> tuple[int, int]:
    return embedding.grid_of(torch.empty(1, 1, *size, device="meta"))


def _resampled(factors: Factors, embedding: Embedding, grid: tuple[int, int]) -> Factors:
    """Resample the rows of b as timm resamples those of the table: it is linear in them."""
    a, b = factors.values()
    old: Any = list(embedding.grid)
    rows = resample_abs_pos_embed(b[None], list(grid), old, num_prefix_tokens=embedding.own)
    return Factors(a, rows[0, embedding.own :])
