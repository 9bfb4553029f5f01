"""Rows of all processes in one tensor, through which gradients flow back to the process that made them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vtk.training.engine.processes import Ranks


def gather_rows(own: Tensor, ranks: Ranks) -> tuple[Tensor, int]:
    """Return the rows (N, …) of every process, in order of rank, and where this process's own begin.

    Processes may have unequal numbers of rows. The gradient that a process gets for its rows is the sum of what all
    processes' losses say of them; all of them must run the backward pass.

    Args:
        own: (n, …), of one dtype and width everywhere.
        ranks: this process and the others.
    """
    if ranks.world == 1:
        return own, 0
    counts = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(ranks.world)]
    dist.all_gather(counts, torch.tensor([len(own)], device=own.device))
    sizes = [int(count) for count in counts]
    start = sum(sizes[: ranks.rank])
    rows: Tensor = _Gather.apply(own, sizes, start)  # type: ignore[no-untyped-call]
    return rows, start


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, sizes: list[int], start: int) -> Tensor:
        ctx.start, ctx.count = start, len(own)
        # tensors of a message have one size: short ones are filled up, and cut again
        filled = own.new_zeros(max(sizes), *own.shape[1:])
        filled[: len(own)] = own
        parts = [torch.empty_like(filled) for _ in sizes]
        dist.all_gather(parts, filled)
        return torch.cat([rows[:size] for rows, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total[ctx.start : ctx.start + ctx.count], None, None
