"""Kernel of `context_broadcast`, optionally with the row statistics of its output."""

from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._device import chained, follow
from vtk_kernels._dispatch import on_device
from vtk_kernels._rows import contiguous
from vtk_kernels._triton import tl, triton
from vtk_kernels.row_stats import PIECE, pieces_of, store_piece


@triton.jit
@no_type_check
def _context_broadcast_kernel(
    y_ptr,  # out (T, C)
    mean_ptr,  # out (segments, C), fp32: means of m over tokens
    stats_ptr,  # out (T, blocks of channels, 2), fp32, where BLOCK_C is 64: row statistics of y; or None
    x_ptr,  # (T, C), or None: 0
    m_ptr,  # (T, C)
    scale_ptr,  # (C,), or None for ½ (m + mean m)
    bounds_ptr,  # (segments,), int32: first row of each; or None where every segment has N rows
    T,  # rows in all
    N,  # rows of a segment where bounds is None
    C,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    blocks = tl.cdiv(C, BLOCK_C)
    segment = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    if bounds_ptr is None:
        first = segment * N
        last = first + N
    else:  # the segment after the last bound ends with the rows
        first = tl.load(bounds_ptr + segment).to(tl.int64)
        more = (segment + 1) * blocks < tl.num_programs(0)
        last = tl.load(bounds_ptr + segment + 1, mask=more, other=T).to(tl.int64)
    channel = block * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < C
    token = tl.arange(0, BLOCK_N)

    total = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for start in range(first, last, BLOCK_N):
        row = start + token
        mask = (row < last)[:, None] & inside[None, :]
        total += tl.load(m_ptr + (row * C)[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / tl.maximum(last - first, 1).to(tl.float32)
    tl.store(mean_ptr + segment * C + channel, mean, mask=inside)
    if scale_ptr is not None:
        mean *= tl.load(scale_ptr + channel, mask=inside, other=0.0).to(tl.float32)

    for start in range(first, last, BLOCK_N):
        row = start + token
        mask = (row < last)[:, None] & inside[None, :]
        offset = (row * C)[:, None] + channel[None, :]
        y = tl.load(m_ptr + offset, mask=mask, other=0.0).to(tl.float32) + mean[None, :]
        if scale_ptr is None:
            y *= 0.5
        if x_ptr is not None:
            y += tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        y = y.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + offset, y, mask=mask)
        if stats_ptr is not None:  # y is 0 outside the channels
            store_piece(stats_ptr, y.to(tl.float32), row, last, block, blocks, tl.minimum(C - block * BLOCK_C, BLOCK_C))


def _config(segments: int, channels: int, stats: bool) -> tuple[int, int]:
    """Return (BLOCK_N, BLOCK_C): 4,096 elements a program; narrow blocks where few images would starve the device.

    With row statistics a block is a piece of them.
    """
    width = PIECE
    while width > 16 and not stats and segments * triton.cdiv(channels, width) < 256:
        width //= 2
    return 4096 // width, width


def launch(
    x: Tensor | None, m: Tensor, scale: Tensor | None, cu_seqlens: Tensor | None, stats: bool = False
) -> tuple[Tensor, ...]:
    """Start the kernels of `context_broadcast`.

    Args:
        x: like ``m``; None to leave it out of y.
        m: (B, N, C), or (T, C) with ``cu_seqlens``.
        scale: (C,), or None for ½ (m + mean m).
        cu_seqlens: (S + 1,) int32, or None.
        stats: with row statistics.

    Returns:
        y like ``m`` and the means over tokens, (B, C) or (S + 1, C), fp32; with ``stats`` also the statistics of the
        rows of y, (..., ceil(C / 64), 2), fp32.
    """
    rows, channels = m.numel() // m.shape[-1], m.shape[-1]
    segments, length = (m.shape[0], m.shape[1]) if cu_seqlens is None else (cu_seqlens.numel(), 0)
    y = torch.empty(m.shape, dtype=m.dtype, device=m.device)
    mean = torch.empty(segments, channels, dtype=torch.float32, device=m.device)
    found = None
    if stats:
        found = torch.empty((*m.shape[:-1], pieces_of(channels), 2), dtype=torch.float32, device=m.device)
    block_n, block_c = _config(segments, channels, stats)
    blocks = triton.cdiv(channels, block_c)
    if segments:
        with on_device(m):
            _context_broadcast_kernel[(segments * blocks,)](
                y,
                mean,
                found,
                contiguous(x),
                m.contiguous(),
                contiguous(scale),
                contiguous(cu_seqlens),
                rows,
                length,
                channels,
                BLOCK_N=block_n,
                BLOCK_C=block_c,
                num_warps=4,
                **chained(m, segments * blocks),
            )
    return (y, mean) if found is None else (y, mean, found)
