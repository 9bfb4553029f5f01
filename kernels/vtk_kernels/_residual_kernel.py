"""Kernel of `linear_residual` whose K is cut into slices, for few rows: the last program of a tile finishes it.

One program owns one slice of one tile. The first slice's sums start from residual + bias, those of the others from 0.
Behind a norm, whose 1/σ scales a row of the product alone, they start from σ · (residual + bias), and the last program
scales the whole.
A program leaves its sums in memory and counts itself at the tile; the last to come adds all of them in ascending order,
its own read back like the others', so that the bits do not depend on who came last. It stores y and the statistics of
its rows and sets the counter to 0 for the next launch.

Counters are 0 before and after a launch. Launches that follow each other share them, chained ones too: each has waited
for the one before when it counts. Launches that may run at once must not. What cuts a launch short, such as an illegal
address, ends its CUDA context and the counters with it; and a pass zeroes its own anew (`patchify_counters`).
"""

from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._device import ahead, chained, fetch, follow, is_hopper
from vtk_kernels._dispatch import on_device
from vtk_kernels._epilogue import start_of
from vtk_kernels._matmul import (
    GROUP,
    aligned,
    has_tensor_map,
    in_tiles,
    mapped_product,
    product,
    slice_length,
    tile_of,
    tile_options,
)
from vtk_kernels._rows import as_rows, contiguous
from vtk_kernels._triton import tl, triton
from vtk_kernels.row_stats import PIECE, load_rstd, pieces_of, store_piece


@triton.jit
@no_type_check
def slice_of(pid, programs, SPLITS: tl.constexpr):
    """Return (tile, slice) of a program: the slices of a tile run side by side, so that tiles are finished early."""
    return pid // SPLITS, pid % SPLITS


@triton.jit(do_not_specialize=["T"])  # it differs from batch to batch
@no_type_check
def _residual_kernel(
    y_ptr,  # out (T, F)
    stats_ptr,  # out (T, ceil(F / 64), 2), fp32: row statistics of y
    partials_ptr,  # (tiles, SPLITS, BLOCK_T, BLOCK_F), fp32: between the programs of a tile
    counters_ptr,  # (tiles,), int32, all 0
    x_ptr,  # (T, K); with TMA its tensor map
    w_ptr,  # (F, K); likewise
    b_ptr,  # (F,), or None
    x_stats_ptr,  # (T, ceil(K / 64), 2), fp32: row statistics of x; or None
    residual_ptr,  # (T, F)
    ahead_ptr,  # (F, K): w, to be fetched before the wait; or None
    stride_xt,  # from a row of x to the next
    stride_wf,  # of w
    stride_st,  # of x_stats
    stride_rt,  # of the residual
    T,
    F,
    K,
    eps,
    length,  # columns of a slice, a multiple of BLOCK_K
    PIECES: tl.constexpr,  # of a row of x
    RMS: tl.constexpr,  # its norm is RMSNorm
    SPLITS: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,  # columns of a piece
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    if ahead_ptr is not None:
        fetch(ahead_ptr, F * K, pid, tl.num_programs(0))
        if b_ptr is not None:
            fetch(b_ptr, F, pid, tl.num_programs(0))
    follow(PDL)
    tile, split = slice_of(pid, tl.num_programs(0), SPLITS)
    tile_t, tile_f = tile_of(tile, T, F, BLOCK_T, BLOCK_F, GROUP)
    tile_row = tile_t * BLOCK_T
    tile_out = tile_f * BLOCK_F
    there = tl.where(split == 0, T, 0)  # rows that this slice's sums begin with
    total = start_of(b_ptr, residual_ptr, stride_rt, tile_row, tile_out, there, F, False, BLOCK_T, BLOCK_F)
    row = (tile_row + tl.arange(0, BLOCK_T)).to(tl.int64)
    scale = None
    if x_stats_ptr is not None:
        scale = load_rstd(x_stats_ptr, stride_st, row, T, K, eps, PIECES, 8, RMS)
        total /= scale[:, None]
    out = tile_out + tl.arange(0, BLOCK_F)
    mask = (row < T)[:, None] & (out < F)[None, :]
    first = split * length
    if TMA:
        last = tl.minimum(first + length, K)
        total = mapped_product(x_ptr, w_ptr, tile_row, tile_out, first, last, BLOCK_T, BLOCK_F, BLOCK_K, total)
    else:
        step = first + tl.arange(0, BLOCK_K)
        total = product(
            x_ptr + (row * stride_xt)[:, None] + step[None, :],
            w_ptr + (out.to(tl.int64) * stride_wf)[None, :] + step[:, None],
            (row < T)[:, None],
            (out < F)[None, :],
            tl.minimum(length, K - first),
            1,
            1,
            EVEN_K,
            BLOCK_T,
            BLOCK_F,
            BLOCK_K,
            total,
        )
    part = BLOCK_T * BLOCK_F
    parts = partials_ptr + tile.to(tl.int64) * (SPLITS * part)
    parts += tl.arange(0, BLOCK_T)[:, None] * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    tl.store(parts + split * part, total, mask=mask)
    tl.debug_barrier()  # what every thread stored goes before one thread's count; Triton 3.6 and 3.8 would set it too
    before = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")
    if before == SPLITS - 1:
        tl.store(counters_ptr + tile, 0)
        total = tl.load(parts, mask=mask, other=0.0, cache_modifier=".cg")
        for i in tl.static_range(1, SPLITS):
            total += tl.load(parts + i * part, mask=mask, other=0.0, cache_modifier=".cg")
        if scale is not None:
            total *= scale[:, None]
        y = total.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + (row * F)[:, None] + out[None, :], y, mask=mask)
        store_piece(stats_ptr, y.to(tl.float32), row, T, tile_f, tl.cdiv(F, BLOCK_F), tl.minimum(F - tile_out, BLOCK_F))


def counters_needed(rows: int, channels: int) -> int:
    """Return how many counters hold those of every tile of an output (rows, channels)."""
    return triton.cdiv(rows, 32) * pieces_of(channels)


def _tiles(mapped: bool, rows: int, *operands: Tensor) -> tuple[int, int, int, int, int]:
    """Return (BLOCK_T, BLOCK_F, BLOCK_K, num_warps, num_stages).

    Tiles of 64 rows, which Hopper's matrix units want. Three stages, although a fourth would fit: the programs of the
    next kernel of a chain need their shared memory beside it.
    """
    if operands[0].element_size() > 2:
        return 32, PIECE, 32, 4, 2
    if not mapped and not aligned(*operands):
        return 64, PIECE, 32, 4, 2
    return 16 if rows <= 16 else 32 if rows <= 32 else 64, PIECE, 128 if mapped else 64, 4, 3


def launch(
    x: Tensor, w: Tensor, b: Tensor | None, residual: Tensor, splits: int, counters: Tensor,
    row_stats: Tensor | None = None, eps: float | None = None, rms: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Start the kernel; arguments and results as of `linear_residual`."""
    a, weight, past = as_rows(x), as_rows(w), as_rows(residual)
    (rows, size), features = a.shape, weight.shape[0]
    known = None if row_stats is None else as_rows(row_stats.flatten(-2))
    tma = is_hopper(x) and has_tensor_map(a, weight)
    block_t, block_f, block_k, warps, stages = _tiles(tma, rows, a, weight)
    y = torch.empty((*x.shape[:-1], features), dtype=x.dtype, device=x.device)
    stats = torch.empty((*y.shape[:-1], pieces_of(features), 2), dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(rows, block_t) * triton.cdiv(features, block_f)
    partials = torch.empty((tiles, splits, block_t, block_f), dtype=torch.float32, device=x.device)
    if y.numel():
        options = chained(x, tiles * splits)
        with on_device(x):
            _residual_kernel[(tiles * splits,)](
                y,
                stats,
                partials,
                counters,
                in_tiles(a, tma, block_t, block_k),
                in_tiles(weight, tma, block_f, block_k),
                contiguous(b),
                known,
                past,
                ahead(options, rows, weight),
                a.stride(0),
                weight.stride(0),
                0 if known is None else known.stride(0),
                past.stride(0),
                rows,
                features,
                size,
                float(eps or 0.0),
                slice_length(size, splits),
                PIECES=0 if known is None else pieces_of(size),
                RMS=rms,
                SPLITS=splits,
                GROUP=GROUP,
                **tile_options(tma, size, (block_t, block_f, block_k, warps, stages)),
                **options,
            )
    return y, stats
