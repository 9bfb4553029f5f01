"""Kernel of `linear` and `linear_gelu`: a matrix product whose programs take one tile of y after another.

On Hopper and later, tiles of x and w are copied by the card's copy engine (tensor maps): no address is computed in a
thread and nothing is masked, rows and columns outside being zero. There are at most two programs a multiprocessor, each
with 128 × 128 sums, so that one computes GELU while the other multiplies: at 12,608 × 384 × 3,072 on an H200 that took
81 µs against 88 with one tile a program and 102 without tensor maps (cuBLAS and a kernel for GELU: 108).
"""

from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._device import chained, follow, is_hopper, multiprocessors
from vtk_kernels._dispatch import on_device
from vtk_kernels._gelu import gelu, gelu_byte
from vtk_kernels._matmul import (
    GROUP,
    has_tensor_map,
    mapped_product,
    mapped_tile_config,
    product,
    tensor_map,
    tile_config,
    tile_of,
)
from vtk_kernels._rows import as_rows
from vtk_kernels._triton import tl, triton


@triton.jit
@no_type_check
def _finish(
    y_ptr,
    q_ptr,
    b_ptr,
    row_scale_ptr,
    u,
    tile_row,
    tile_out,
    T,
    F,
    GELU: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Scale and shift the sums (BLOCK_T, BLOCK_F) that begin at a row and a column, apply GELU, and store."""
    row = tile_row + tl.arange(0, BLOCK_T)
    out = tile_out + tl.arange(0, BLOCK_F)
    if row_scale_ptr is not None:
        u *= tl.load(row_scale_ptr + row, mask=row < T, other=0.0).to(tl.float32)[:, None]
    if b_ptr is not None:
        u += tl.load(b_ptr + out, mask=out < F, other=0.0).to(tl.float32)[None, :]
    mask = (row < T)[:, None] & (out < F)[None, :]
    at = (row.to(tl.int64) * F)[:, None] + out[None, :]
    y = u
    if GELU:
        y = gelu(u)
    if TMA:
        y_ptr.store([tile_row, tile_out], y.to(y_ptr.dtype))
    else:
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    if q_ptr is not None:
        tl.store(q_ptr + at, gelu_byte(u), mask=mask)


@triton.jit(do_not_specialize=["T", "programs"])  # they differ from batch to batch
@no_type_check
def _linear_kernel(
    y_ptr,  # out (T, F); with TMA the tensor map of its tiles
    q_ptr,  # out (T, F), uint8; or None
    x_ptr,  # (T, K); with TMA its tensor map
    w_ptr,  # (F, K); likewise
    b_ptr,  # (F,), or None
    row_scale_ptr,  # (T,), fp32; or None
    stride_xt,  # from a row of x to the next
    stride_wf,  # of w
    T,
    F,
    K,
    programs,
    GELU: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,  # finish a tile in two halves of its columns: half the memory for the stores
    PDL: tl.constexpr,
):
    follow(PDL)
    tiles = tl.cdiv(T, BLOCK_T) * tl.cdiv(F, BLOCK_F)
    for tile in tl.range(tl.program_id(0), tiles, programs, flatten=TMA):
        tile_t, tile_f = tile_of(tile, T, F, BLOCK_T, BLOCK_F, GROUP)
        tile_row = tile_t * BLOCK_T
        tile_out = tile_f * BLOCK_F
        if TMA:
            u = mapped_product(x_ptr, w_ptr, tile_row, tile_out, 0, K, BLOCK_T, BLOCK_F, BLOCK_K)
        else:
            row = tile_row + tl.arange(0, BLOCK_T)
            out = tile_out + tl.arange(0, BLOCK_F)
            step = tl.arange(0, BLOCK_K)
            u = product(
                x_ptr + (row.to(tl.int64) * stride_xt)[:, None] + step[None, :],
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
            )
        if HALVES:
            left, right = tl.split(tl.permute(tl.reshape(u, (BLOCK_T, 2, BLOCK_F // 2)), (0, 2, 1)))
            half: tl.constexpr = BLOCK_F // 2
            _finish(y_ptr, q_ptr, b_ptr, row_scale_ptr, left, tile_row, tile_out, T, F, GELU, TMA, BLOCK_T, half)
            tile_out += half
            _finish(y_ptr, q_ptr, b_ptr, row_scale_ptr, right, tile_row, tile_out, T, F, GELU, TMA, BLOCK_T, half)
        else:
            _finish(y_ptr, q_ptr, b_ptr, row_scale_ptr, u, tile_row, tile_out, T, F, GELU, TMA, BLOCK_T, BLOCK_F)


def launch(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    *,
    activation: bool,
    save_grad: bool = False,
    row_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Start the kernel; return y (..., F) and, with ``save_grad``, q, its shape in uint8.

    Args:
        x: (..., K).
        w: (F, K).
        b: (F,), or None.
        activation: apply GELU.
        save_grad: also compute q.
        row_scale: (...), fp32, or None.
    """
    shape = (*x.shape[:-1], w.shape[0])
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    q = torch.empty(shape, dtype=torch.uint8, device=x.device) if save_grad else None
    a, weight = as_rows(x), as_rows(w)
    (rows, size), features = a.shape, weight.shape[0]
    flat = y.view(-1, features)
    tma = is_hopper(x) and has_tensor_map(a, weight, flat)
    if tma:
        block_t, block_f, block_k, warps, stages = mapped_tile_config(rows, features)
    else:
        block_t, block_f, block_k, warps, stages = tile_config(rows, features, a, weight)
    halves = save_grad or block_t * block_f >= 128 * 128
    if y.numel():
        tiles = triton.cdiv(rows, block_t) * triton.cdiv(features, block_f)
        programs = min(tiles, 2 * multiprocessors(x)) if tma else tiles
        with on_device(x):
            _linear_kernel[(programs,)](
                tensor_map(flat, block_t, block_f // 2 if halves else block_f) if tma else y,
                q,
                tensor_map(a, block_t, block_k) if tma else a,
                tensor_map(weight, block_f, block_k) if tma else weight,
                None if b is None else b.contiguous(),
                None if row_scale is None else row_scale.contiguous(),
                a.stride(0),
                weight.stride(0),
                rows,
                features,
                size,
                programs,
                GELU=activation,
                TMA=tma,
                EVEN_K=size % block_k == 0,
                BLOCK_T=block_t,
                BLOCK_F=block_f,
                BLOCK_K=block_k,
                GROUP=GROUP,
                HALVES=halves,
                num_warps=warps,
                num_stages=stages,
                **chained(x, programs),
            )
    return y, q
