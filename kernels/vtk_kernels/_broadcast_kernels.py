"""Kernels of `context_broadcast`: the broadcast itself, and the merge of row statistics over blocks of channels."""

from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._device import chained, follow
from vtk_kernels._dispatch import on_device
from vtk_kernels._triton import tl, triton


@triton.jit
@no_type_check
def _context_broadcast_kernel(
    y_ptr,  # out (T, C)
    mean_ptr,  # out (segments, C), fp32: means of m over tokens
    part_ptr,  # out (2, blocks of channels, T), fp32: mean and M2 of a row of y inside a block; or None
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
        tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)
        if part_ptr is not None:
            width = tl.minimum(C - block * BLOCK_C, BLOCK_C)
            centre = tl.sum(y, 1) / width  # y is 0 outside the channels
            apart = tl.where(mask, y - centre[:, None], 0.0)
            at = part_ptr + block.to(tl.int64) * T + row
            tl.store(at, centre, mask=row < last)
            tl.store(at + blocks.to(tl.int64) * T, tl.sum(apart * apart, 1), mask=row < last)


@triton.jit
@no_type_check
def _merge_kernel(
    mean_ptr,  # out (T,), fp32
    m2_ptr,  # out (T,), fp32
    part_ptr,  # (2, blocks, T), fp32: mean and M2 of each block of channels
    T,
    C,
    WIDTH: tl.constexpr,  # channels of a block
    BLOCKS: tl.constexpr,  # blocks, up to a power of two
    BLOCK_T: tl.constexpr,
):
    # Chan, Golub, LeVeque 1979: M2 of a union = Σ M2 + Σ size (mean − mean of all)². Sums of squares would cancel.
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    block = tl.arange(0, BLOCKS)
    blocks = tl.cdiv(C, WIDTH)
    mask = (block < blocks)[:, None] & (row < T)[None, :]
    at = part_ptr + block.to(tl.int64)[:, None] * T + row[None, :]
    mean = tl.load(at, mask=mask, other=0.0)
    m2 = tl.load(at + blocks.to(tl.int64) * T, mask=mask, other=0.0)
    size = tl.maximum(tl.minimum(C - block * WIDTH, WIDTH), 0).to(tl.float32)[:, None]
    whole = tl.sum(size * mean, 0) / C
    apart = mean - whole[None, :]
    tl.store(mean_ptr + row, whole, mask=row < T)
    tl.store(m2_ptr + row, tl.sum(m2 + size * apart * apart, 0), mask=row < T)


def _config(segments: int, channels: int) -> tuple[int, int]:
    """Return (BLOCK_N, BLOCK_C): 4,096 elements a program; narrow blocks where few images would starve the device."""
    width = 64
    while width > 16 and segments * triton.cdiv(channels, width) < 256:
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
        y like ``m`` and the means over tokens, (B, C) or (S + 1, C), fp32; with ``stats`` y and its rows' mean and M2.
    """
    rows, channels = m.numel() // m.shape[-1], m.shape[-1]
    segments, length = (m.shape[0], m.shape[1]) if cu_seqlens is None else (cu_seqlens.numel(), 0)
    y = torch.empty(m.shape, dtype=m.dtype, device=m.device)
    mean = torch.empty(segments, channels, dtype=torch.float32, device=m.device)
    block_n, block_c = _config(segments, channels)
    blocks = triton.cdiv(channels, block_c)
    part = torch.empty(2, blocks, rows, dtype=torch.float32, device=m.device) if stats else None
    if segments:
        with on_device(m):
            _context_broadcast_kernel[(segments * blocks,)](
                y,
                mean,
                part,
                None if x is None else x.contiguous(),
                m.contiguous(),
                None if scale is None else scale.contiguous(),
                None if cu_seqlens is None else cu_seqlens.contiguous(),
                rows,
                length,
                channels,
                BLOCK_N=block_n,
                BLOCK_C=block_c,
                num_warps=4,
                **chained(m, segments * blocks),
            )
    if part is None:
        return y, mean
    row_mean, m2 = (torch.empty(m.shape[:-1], dtype=torch.float32, device=m.device) for _ in range(2))
    padded = triton.next_power_of_2(blocks)
    block_t = max(2048 // padded, 1)
    if rows:
        with on_device(m):
            _merge_kernel[(triton.cdiv(rows, block_t),)](
                row_mean, m2, part, rows, channels, WIDTH=block_c, BLOCKS=padded, BLOCK_T=block_t, num_warps=4
            )
    return y, row_mean, m2
