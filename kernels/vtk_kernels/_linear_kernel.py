"""Kernel of `linear`, `linear_gelu` and `linear_residual`: a matrix product whose programs take tile after tile of y.

On Hopper and later, tiles of x and w are copied by the card's copy engine (tensor maps): no address is computed in a
thread and nothing is masked, rows and columns outside being zero. There are at most two programs a multiprocessor, each
with 128 × 128 sums, so that one computes GELU while the other multiplies: at 12,608 × 384 × 3,072 on an H200 that took
81 µs against 88 with one tile a program and 102 without tensor maps (cuBLAS and a kernel for GELU: 108).
"""

from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._device import ahead, chained, fetch, follow, is_hopper
from vtk_kernels._dispatch import on_device
from vtk_kernels._epilogue import finish, start_of
from vtk_kernels._matmul import (
    GROUP,
    has_tensor_map,
    in_tiles,
    mapped_product,
    mapped_tile_config,
    product,
    residual_tile_config,
    tensor_map,
    tile_config,
    tile_of,
    tile_options,
)
from vtk_kernels._resident import programs as resident_programs
from vtk_kernels._resident import registers
from vtk_kernels._rows import as_rows, contiguous
from vtk_kernels._triton import tl, triton
from vtk_kernels.row_stats import MANY, PIECE, load_rstd, pieces_of

_MANY = tl.constexpr(MANY)


@triton.jit(do_not_specialize=["T", "programs"])  # they differ from batch to batch
@no_type_check
def _linear_kernel(
    y_ptr,  # out (T, F); with TMA the tensor map of its tiles
    q_ptr,  # out (T, F), uint8; or None
    y_stats_ptr,  # out (T, ceil(F / 64), 2), fp32: row statistics of y; or None
    x_ptr,  # (T, K); with TMA its tensor map
    w_ptr,  # (F, K); likewise
    b_ptr,  # (F,), or None
    x_stats_ptr,  # (T, ceil(K / 64), 2), fp32: row statistics of x; or None
    residual_ptr,  # (T, F), or None; with TMA its tensor map
    ahead_ptr,  # (F, K): w, to be fetched before the wait; or None
    stride_xt,  # from a row of x to the next
    stride_wf,  # of w
    stride_st,  # of x_stats
    stride_rt,  # of the residual
    T,
    F,
    K,
    eps,
    programs,
    PIECES: tl.constexpr,  # of a row of x
    RMS: tl.constexpr,  # its norm is RMSNorm
    GELU: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,  # finish a tile in two halves of its columns: half the memory for the stores
    START: tl.constexpr,  # a program owns one tile, whose sums start from residual and bias
    PDL: tl.constexpr,
):
    if ahead_ptr is not None:
        fetch(ahead_ptr, F * K, tl.program_id(0), programs)
        if b_ptr is not None:
            fetch(b_ptr, F, tl.program_id(0), programs)
    follow(PDL)
    tiles = tl.cdiv(T, BLOCK_T) * tl.cdiv(F, BLOCK_F)
    for tile in tl.range(tl.program_id(0), tiles, programs, flatten=TMA and not START and PIECES <= _MANY):
        tile_t, tile_f = tile_of(tile, T, F, BLOCK_T, BLOCK_F, GROUP)
        tile_row = tile_t * BLOCK_T
        tile_out = tile_f * BLOCK_F
        row = (tile_row + tl.arange(0, BLOCK_T)).to(tl.int64)
        scale = None
        start = None
        shift_ptr = b_ptr
        added_ptr = residual_ptr
        if START:
            start = start_of(b_ptr, residual_ptr, stride_rt, tile_row, tile_out, T, F, TMA, BLOCK_T, BLOCK_F)
            shift_ptr = None
            added_ptr = None
        if x_stats_ptr is not None and (not TMA or PIECES > _MANY):  # the sums, once there, leave no registers for it
            scale = load_rstd(x_stats_ptr, stride_st, row, T, K, eps, PIECES, 8 if PIECES > _MANY else 1, RMS)
        if TMA:
            u = mapped_product(x_ptr, w_ptr, tile_row, tile_out, 0, K, BLOCK_T, BLOCK_F, BLOCK_K, start)
            if x_stats_ptr is not None and PIECES <= _MANY:
                scale = load_rstd(x_stats_ptr, stride_st, row, T, K, eps, PIECES, 0, RMS)
        else:
            out = tile_out + tl.arange(0, BLOCK_F)
            step = tl.arange(0, BLOCK_K)
            u = product(
                x_ptr + (row * stride_xt)[:, None] + step[None, :],
                w_ptr + (out.to(tl.int64) * stride_wf)[None, :] + step[:, None],
                (row < T)[:, None],
                (out < F)[None, :],
                K,
                1,
                1,
                EVEN_K,
                BLOCK_T,
                BLOCK_F,
                BLOCK_K,
                start,
            )
        if HALVES:
            left, right = tl.split(tl.permute(tl.reshape(u, (BLOCK_T, 2, BLOCK_F // 2)), (0, 2, 1)))
            half: tl.constexpr = BLOCK_F // 2
            finish(
                y_ptr, q_ptr, y_stats_ptr, left, scale, shift_ptr, added_ptr, stride_rt,
                tile_row, tile_out, T, F, GELU, TMA, BLOCK_T, half,
            )  # fmt: skip
            finish(
                y_ptr, q_ptr, y_stats_ptr, right, scale, shift_ptr, added_ptr, stride_rt,
                tile_row, tile_out + half, T, F, GELU, TMA, BLOCK_T, half,
            )  # fmt: skip
        else:
            finish(
                y_ptr, q_ptr, y_stats_ptr, u, scale, shift_ptr, added_ptr, stride_rt,
                tile_row, tile_out, T, F, GELU, TMA, BLOCK_T, BLOCK_F,
            )  # fmt: skip


def launch(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    *,
    activation: bool = False,
    save_grad: bool = False,
    row_stats: Tensor | None = None,
    eps: float | None = None,
    rms: bool = False,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Start the kernel.

    Args:
        x: (..., K).
        w: (F, K).
        b: (F,), or None.
        activation: apply GELU.
        save_grad: also compute q.
        row_stats: (..., S, 2) of the rows of ``x``, fp32, with ``eps``; or None.
        eps: added to their variance.
        rms: or to their mean square.
        residual: (..., F), added to y, whose row statistics are then taken; or None.

    Returns:
        y: (..., F).
        q: like y in uint8; None without ``save_grad``.
        stats: (..., ceil(F / 64), 2), fp32, of the rows of y; None without ``residual``.
    """
    shape = (*x.shape[:-1], w.shape[0])
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    q = torch.empty(shape, dtype=torch.uint8, device=x.device) if save_grad else None
    stats = None
    if residual is not None:
        stats = torch.empty((*shape[:-1], pieces_of(w.shape[0]), 2), dtype=torch.float32, device=x.device)
    a, weight = as_rows(x), as_rows(w)
    (rows, size), features = a.shape, weight.shape[0]
    flat, past = y.view(-1, features), None if residual is None else as_rows(residual)
    known = None if row_stats is None else as_rows(row_stats.flatten(-2))
    tma = is_hopper(x) and has_tensor_map(a, weight, flat, *(() if past is None else (past,)))
    if past is not None:
        block_t, block_f, block_k, warps, stages = residual_tile_config(tma, rows, features, a, weight)
        halves = block_f > PIECE
    else:
        config = mapped_tile_config(rows, features, save_grad) if tma else tile_config(rows, features, a, weight)
        block_t, block_f, block_k, warps, stages = config
        halves = save_grad or block_t * block_f >= 128 * 128
    width = block_f // 2 if halves else block_f
    if y.numel():
        tiles = triton.cdiv(rows, block_t) * triton.cdiv(features, block_f)
        programs = min(tiles, resident_programs("_linear_kernel", x)) if tma else tiles
        options = chained(x, programs)
        with on_device(x):
            _linear_kernel[(programs,)](
                tensor_map(flat, block_t, width) if tma else y,
                q,
                stats,
                in_tiles(a, tma, block_t, block_k),
                in_tiles(weight, tma, block_f, block_k),
                contiguous(b),
                known,
                tensor_map(past, block_t, width) if tma and past is not None else past,
                ahead(options, rows, weight),
                a.stride(0),
                weight.stride(0),
                0 if known is None else known.stride(0),
                0 if past is None else past.stride(0),
                rows,
                features,
                size,
                float(eps or 0.0),
                programs,
                PIECES=0 if known is None else pieces_of(size),
                RMS=rms,
                GELU=activation,
                GROUP=GROUP,
                HALVES=halves,
                START=past is not None and known is None and not halves and programs == tiles,
                **tile_options(tma, size, (block_t, block_f, block_k, warps, stages)),
                maxnreg=registers("_linear_kernel", warps, x) if tma else None,
                **options,
            )
    return y, q, stats
