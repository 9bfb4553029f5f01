"""Kernel of `linear_swiglu_backward`: the product with fc2's weight, scaled by the two factors of gate and value."""

from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._device import is_hopper
from vtk_kernels._dispatch import on_device
from vtk_kernels._glu_codes import decode
from vtk_kernels._matmul import GROUP, has_tensor_map, in_tiles, product, tile_config, tile_of
from vtk_kernels._resident import registers
from vtk_kernels._rows import as_rows
from vtk_kernels._triton import tl, triton
from vtk_kernels.row_stats import PIECE


@triton.jit(do_not_specialize=["T"])  # it differs from batch to batch
@no_type_check
def _swiglu_backward_kernel(
    gu_ptr,  # out (T, 2 F)
    g_ptr,  # (T, C), or without w2 (T, F); with TMA the tensor map of its tiles
    w2_ptr,  # (C, F); likewise; or None
    q_ptr,  # (T, 2 F), uint8
    scale_ptr,  # (T, ceil(F / 64), 2), fp32
    stride_gt,  # from a row of g to the next
    stride_wc,  # of w2
    T,
    F,
    C,
    TMA: tl.constexpr,
    EVEN_C: tl.constexpr,  # C is a multiple of BLOCK_C
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,  # columns of a piece
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile_t, tile_f = tile_of(tl.program_id(0), T, F, BLOCK_T, BLOCK_F, GROUP)
    row = tile_t.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    out = tile_f * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = (row < T)[:, None] & (out < F)[None, :]
    if w2_ptr is None:
        gy = tl.load(g_ptr + (row * stride_gt)[:, None] + out[None, :], mask=mask, other=0.0).to(tl.float32)
    elif TMA:
        gy = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
        for start in range(0, C, BLOCK_C):
            gy = tl.dot(g_ptr.load([tile_t * BLOCK_T, start]), w2_ptr.load([start, tile_f * BLOCK_F]), gy)
    else:
        step = tl.arange(0, BLOCK_C)
        gy = product(
            g_ptr + (row * stride_gt)[:, None] + step[None, :],
            w2_ptr + (step.to(tl.int64) * stride_wc)[:, None] + out[None, :],
            (row < T)[:, None],
            (out < F)[None, :],
            C,
            1,
            stride_wc,
            EVEN_C,
            BLOCK_T,
            BLOCK_F,
            BLOCK_C,
        )
    at = (row * 2 * F)[:, None] + out[None, :]
    scale_at = scale_ptr + (row * tl.cdiv(F, BLOCK_F) + tile_f) * 2
    for half in tl.static_range(2):
        codes = tl.load(q_ptr + at + half * F, mask=mask, other=128)
        factor = decode(codes, tl.load(scale_at + half, mask=row < T, other=0.0))
        tl.store(gu_ptr + at + half * F, (gy * factor).to(gu_ptr.dtype.element_ty), mask=mask)


def launch(g: Tensor, w2: Tensor | None, q: Tensor, scales: Tensor) -> Tensor:
    """Start the kernel; arguments and result as of `linear_swiglu_backward`."""
    grad, weight = as_rows(g), None if w2 is None else as_rows(w2)
    (rows, channels), features = grad.shape, q.shape[-1] // 2
    gu = torch.empty(q.shape, dtype=g.dtype, device=g.device)
    tma, (block_t, block_f, block_c, warps, stages) = False, (32, PIECE, 16, 4, 1)
    if weight is not None:
        tma = is_hopper(g) and has_tensor_map(grad, weight)
        block_t, block_f, block_c, warps, stages = tile_config(rows, features, grad, weight)
        block_f, stages = PIECE, 4 if tma else stages  # a piece has one scale
        if features % 16:  # rows that start anywhere: two bytes a store, each with an address
            block_t = min(block_t, 32)
    if gu.numel():
        with on_device(g):
            _swiglu_backward_kernel[(triton.cdiv(rows, block_t) * triton.cdiv(features, block_f),)](
                gu,
                in_tiles(grad, tma, block_t, block_c),
                None if weight is None else in_tiles(weight, tma, block_c, block_f),
                q.contiguous(),
                scales.contiguous(),
                grad.stride(0),
                0 if weight is None else weight.stride(0),
                rows,
                features,
                channels,
                TMA=tma,
                EVEN_C=channels % block_c == 0,
                BLOCK_T=block_t,
                BLOCK_F=block_f,
                BLOCK_C=block_c,
                GROUP=GROUP,
                num_warps=warps,
                num_stages=stages,
                maxnreg=registers("_swiglu_backward_kernel", warps, g) if tma else None,
            )
    return gu
