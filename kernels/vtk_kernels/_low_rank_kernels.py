"""Kernels of `grouped_low_rank`: the thin product onto each group's rank, and the one from there onto the output."""

from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._device import chained, follow
from vtk_kernels._dispatch import on_device
from vtk_kernels._matmul import aligned
from vtk_kernels._resident import registers
from vtk_kernels._rows import as_rows, contiguous
from vtk_kernels._triton import tl, triton

UNIT = 128
"""An int8 factor counts in parts of this: codes are numbers from −1 to 1, exact in fp16 and bf16."""

_RANKS = 16
"""Ranks are taken in multiples of this many: the least that matrix units multiply."""

_UNIT = tl.constexpr(UNIT)


@triton.jit(do_not_specialize=["tiles"])  # it differs from batch to batch
@no_type_check
def _low_rank_shrink_kernel(
    z_ptr,  # out (T, R), R the largest rank; columns beyond a group's own are left as they are
    x_ptr,  # (T, K)
    a_ptr,  # (N, K), the type of x or int8
    scale_ptr,  # (N,), fp32; or None
    x_scale_ptr,  # (K,), fp32; or None
    spans_ptr,  # (G, 2), int32: first row of a, rank
    map_ptr,  # (3, tiles), int32: group, first row, row end
    stride_xt,  # from a row of x to the next
    stride_zt,  # of z
    tiles,
    K,
    PIECES: tl.constexpr,  # of BLOCK_R columns of z
    PARTS: tl.constexpr,  # programs along the rows of a tile
    PDL: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    follow(PDL)
    tile = tl.program_id(0) // (PARTS * PIECES)
    part = tl.program_id(0) // PIECES % PARTS
    column = tl.program_id(0) % PIECES * BLOCK_R + tl.arange(0, BLOCK_R)
    group = tl.load(map_ptr + tile)
    if group >= 0:
        begin = tl.load(spans_ptr + 2 * group)
        rank = tl.load(spans_ptr + 2 * group + 1)
        first = tl.load(map_ptr + tiles + tile)
        last = tl.load(map_ptr + 2 * tiles + tile)
        there = column < rank
        step = tl.arange(0, BLOCK_K)
        a_row = (begin + column).to(tl.int64)
        if tl.program_id(0) % PIECES * BLOCK_R < rank:
            for start in range(first + part * BLOCK_T, last, PARTS * BLOCK_T):
                row = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
                x_tile_ptr = x_ptr + (row * stride_xt)[:, None] + step[None, :]
                a_tile_ptr = a_ptr + (a_row * K)[None, :] + step[:, None]
                total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
                for k in range(0, K, BLOCK_K):
                    if EVEN_K:
                        x = tl.load(x_tile_ptr, mask=(row < last)[:, None], other=0.0)
                        a = tl.load(a_tile_ptr, mask=there[None, :], other=0)
                    else:
                        inside = k + step < K
                        x = tl.load(x_tile_ptr, mask=(row < last)[:, None] & inside[None, :], other=0.0)
                        a = tl.load(a_tile_ptr, mask=there[None, :] & inside[:, None], other=0)
                    if x_scale_ptr is not None:
                        x_scale = tl.load(x_scale_ptr + k + step, mask=k + step < K, other=0.0)
                        a = a.to(tl.float32) * x_scale[:, None]
                    total = tl.dot(x, a.to(x_ptr.dtype.element_ty), total, input_precision="ieee")
                    x_tile_ptr += BLOCK_K
                    a_tile_ptr += BLOCK_K
                if a_ptr.dtype.element_ty == tl.int8:
                    total *= 1.0 / _UNIT
                if scale_ptr is not None:
                    total *= tl.load(scale_ptr + a_row, mask=there, other=0.0)[None, :]
                mask = (row < last)[:, None] & there[None, :]
                z = total.to(z_ptr.dtype.element_ty)
                tl.store(z_ptr + (row * stride_zt)[:, None] + column[None, :], z, mask=mask)


@triton.jit(do_not_specialize=["tiles"])  # it differs from batch to batch
@no_type_check
def _low_rank_expand_kernel(
    y_ptr,  # in and out (T, F)
    z_ptr,  # (T, R); of a row only its group's columns are read
    b_ptr,  # (N, F), the type of y or int8
    y_scale_ptr,  # (F,), fp32; or None
    bias_ptr,  # (G, F), or None
    spans_ptr,  # (G, 2), int32: first row of b, rank
    map_ptr,  # (3, tiles), int32
    stride_yt,  # from a row of y to the next
    stride_zt,  # of z
    tiles,
    F,
    PARTS: tl.constexpr,  # programs along the rows of a tile
    PDL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    follow(PDL)
    columns = tl.cdiv(F, BLOCK_F)
    tile = tl.program_id(0) // (PARTS * columns)
    part = tl.program_id(0) // columns % PARTS
    out = tl.program_id(0) % columns * BLOCK_F + tl.arange(0, BLOCK_F)
    group = tl.load(map_ptr + tile).to(tl.int64)
    if group >= 0:
        begin = tl.load(spans_ptr + 2 * group)
        rank = tl.load(spans_ptr + 2 * group + 1)
        first = tl.load(map_ptr + tiles + tile)
        last = tl.load(map_ptr + 2 * tiles + tile)
        step = tl.arange(0, BLOCK_R)
        for start in range(first + part * BLOCK_T, last, PARTS * BLOCK_T):
            row = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
            mask = (row < last)[:, None] & (out < F)[None, :]
            y_tile_ptr = y_ptr + (row * stride_yt)[:, None] + out[None, :]
            total = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
            for r in range(0, rank, BLOCK_R):
                there = r + step < rank
                z_tile_ptr = z_ptr + (row * stride_zt)[:, None] + (r + step)[None, :]
                z = tl.load(z_tile_ptr, mask=(row < last)[:, None] & there[None, :], other=0.0)
                b_tile_ptr = b_ptr + ((begin + r + step).to(tl.int64) * F)[:, None] + out[None, :]
                b = tl.load(b_tile_ptr, mask=there[:, None] & (out < F)[None, :], other=0)
                total = tl.dot(z, b.to(z_ptr.dtype.element_ty), total, input_precision="ieee")
            if b_ptr.dtype.element_ty == tl.int8:
                total *= 1.0 / _UNIT
            if y_scale_ptr is not None:
                total *= tl.load(y_scale_ptr + out, mask=out < F, other=0.0)[None, :]
            if bias_ptr is not None:
                total += tl.load(bias_ptr + group * F + out, mask=out < F, other=0.0).to(tl.float32)[None, :]
            total += tl.load(y_tile_ptr, mask=mask, other=0.0).to(tl.float32)
            tl.store(y_tile_ptr, total.to(y_ptr.dtype.element_ty), mask=mask)


def _tile(rows: int, tiles: int, x: Tensor, wide: bool) -> tuple[int, int]:
    """Return the rows of a program of either kernel where a map has so many tiles.

    The former reads rows of K elements and multiplies little: short tiles give more multiprocessors a share. The latter
    has matrix units of 64 rows; operands that are not ``wide`` (`aligned`) leave fewer registers for sums.
    """
    if x.element_size() == 2 and rows <= 16 * tiles:
        return 16, 16
    return (32, 64) if x.element_size() == 2 and wide else (32, 32)


def launch(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    spans: Tensor,
    tile_map: Tensor,
    rank: int,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    y_scale: Tensor | None = None,
) -> None:
    """Start the kernels of `grouped_low_rank`; arguments as there."""
    (rows, features), tiles = y.shape, tile_map.shape[1]
    if not (tiles and rows and features) or (rank == 0 and bias is None):
        return
    wide = aligned(as_rows(x), y, a, b)  # what is not has an address in a register for each element
    z = shrink(x, a, spans, tile_map, rank, scale, x_scale, wide)
    expand_t = _tile(rows, tiles, x, wide)[1]
    block_f, block_r = 64 if wide and x.element_size() == 2 else 32, rank_step(rank, wide)
    programs = tiles * _parts(rows, tiles, expand_t) * triton.cdiv(features, block_f)
    with on_device(x):
        _low_rank_expand_kernel[(programs,)](
            y,
            z,
            b.contiguous(),
            contiguous(y_scale),
            contiguous(bias),
            spans.contiguous(),
            tile_map.contiguous(),
            y.stride(0),
            z.stride(0),
            tiles,
            features,
            PARTS=_parts(rows, tiles, expand_t),
            BLOCK_T=expand_t,
            BLOCK_F=block_f,
            BLOCK_R=block_r,
            num_warps=4,
            num_stages=2,
            # where it binds only: under a bound the compiler takes more registers than it would without
            maxnreg=registers("_low_rank_expand_kernel", 4, x) if b.dtype == torch.int8 and block_r == 64 else None,
            **chained(x, programs),
        )


def shrink(
    x: Tensor,
    a: Tensor,
    spans: Tensor,
    tile_map: Tensor,
    rank: int,
    scale: Tensor | None,
    x_scale: Tensor | None,
    wide: bool,
) -> Tensor:
    """Return z (T, R) of `grouped_low_rank`, filled where a row's group has a column; ``wide``: all is `aligned`."""
    (rows, size), tiles = x.shape, tile_map.shape[1]
    z = torch.empty(rows, triton.cdiv(rank, _RANKS) * _RANKS, dtype=x.dtype, device=x.device)
    if rank == 0:
        return z
    inputs, block_r, block_t = as_rows(x), rank_step(rank, wide), _tile(rows, tiles, x, wide)[0]
    block_k = (128 if block_r <= 32 else 64) if wide and x.element_size() == 2 else 32
    pieces, parts = triton.cdiv(rank, block_r), _parts(rows, tiles, block_t)
    with on_device(x):
        _low_rank_shrink_kernel[(tiles * parts * pieces,)](
            z,
            inputs,
            a.contiguous(),
            contiguous(scale),
            contiguous(x_scale),
            spans.contiguous(),
            tile_map.contiguous(),
            inputs.stride(0),
            z.stride(0),
            tiles,
            size,
            PIECES=pieces,
            PARTS=parts,
            EVEN_K=size % block_k == 0,
            BLOCK_T=block_t,
            BLOCK_R=block_r,
            BLOCK_K=block_k,
            num_warps=4,
            num_stages=3,
            **chained(x, tiles * parts * pieces),
        )
    return z


def rank_step(rank: int, wide: bool) -> int:
    """Return how many columns of z a program takes at a time."""
    return min(max(triton.next_power_of_2(rank), _RANKS), 64 if wide else 32)


def _parts(rows: int, tiles: int, block_t: int) -> int:
    """Return the programs along the rows of a tile, by a guess at these: the map's length alone is known."""
    longest = 128 if rows > 64 * tiles else 64
    return max(longest // block_t, 1) if block_t > 16 else 1
