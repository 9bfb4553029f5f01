"""Offsets of packed segments: their check, and their lengths as references read them on the host."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor


def check_segments(cu_seqlens: Tensor | None, x: Tensor, name: str) -> None:
    """Refuse offsets of another type, shape or device than ``x``'s, called ``name``; not their values.

    Raises:
        ValueError: one of these does not fit.
    """
    if cu_seqlens is None:
        return
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or len(cu_seqlens) == 0:
        raise ValueError(
            f"`cu_seqlens` is {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}; it must be (S + 1,) torch.int32"
        )
    if cu_seqlens.device != x.device:
        raise ValueError(f"`cu_seqlens` is on {cu_seqlens.device}; it must be on the device of `{name}`, {x.device}")


def equal_runs(cu_seqlens: Tensor, rows: int, max_seqlen: int | None = None) -> Iterator[tuple[int, int, int]]:
    """Yield (first row, number of segments, their length) for each run of segments of one length.

    Args:
        cu_seqlens: (S + 1,) offsets; on CUDA this waits for the device.
        rows: T, which no offset may exceed.
        max_seqlen: which no length may exceed, if given.

    Raises:
        ValueError: offsets that do not ascend from 0 to at most ``rows``, or a segment that is too long.
    """
    bounds = cu_seqlens.tolist()
    lengths = [last - first for first, last in itertools.pairwise(bounds)]
    if bounds[0] != 0 or min(lengths, default=0) < 0 or bounds[-1] > rows:
        raise ValueError(f"`cu_seqlens` ({bounds}) must ascend from 0 to at most {rows}, the number of rows")
    if max_seqlen is not None and max(lengths, default=0) > max_seqlen:
        raise ValueError(f"`max_seqlen` ({max_seqlen}) is less than the longest segment, {max(lengths)}")
    row = 0
    for length, run in itertools.groupby(lengths):
        count = len(list(run))
        yield row, count, length
        row += count * length
