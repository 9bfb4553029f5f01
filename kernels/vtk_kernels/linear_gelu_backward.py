"""Backward through the second layer of an MLP and its GELU in one matrix product, from GELU′ kept in a byte.

    gu = (g · w2) ⊙ (q STEP + LOW)

g is the gradient of the MLP's output, w2 the weight of fc2, q what `linear_gelu` kept; gu is the gradient of fc1's
output. One program owns one tile of gu and scales its fp32 sums: g · w2 never reaches memory.
Elements moved: reads g and w2 once per column and row of tiles (cached) and T · F bytes of q, writes T · F.
"""

from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._device import is_hopper
from vtk_kernels._dispatch import LAUNCHES, accumulator, on_device, route, runs_kernel
from vtk_kernels._gelu import LOW, STEP
from vtk_kernels._matmul import GROUP, has_tensor_map, in_tiles, product, tile_config, tile_of
from vtk_kernels._resident import registers
from vtk_kernels._rows import as_rows, check_channels
from vtk_kernels._triton import tl, triton

LAUNCHES["linear_gelu_backward"] = 1


def linear_gelu_backward_ref(g: Tensor, w2: Tensor, q: Tensor) -> Tensor:
    """Compute `linear_gelu_backward` by torch. Same arguments and result."""
    wide = accumulator(g.dtype)
    return ((g @ w2).to(wide) * (q.to(wide) * STEP + LOW)).to(g.dtype)


@triton.jit(do_not_specialize=["T"])  # it differs from batch to batch
@no_type_check
def _linear_gelu_backward_kernel(
    gu_ptr,  # out (T, F)
    g_ptr,  # (T, C); with TMA the tensor map of its tiles
    w2_ptr,  # (C, F); likewise
    q_ptr,  # (T, F), uint8
    stride_gt,  # from a row of g to the next
    stride_wc,  # of w2
    T,
    F,
    C,
    LOW: tl.constexpr,
    STEP: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_C: tl.constexpr,  # C is a multiple of BLOCK_C
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile_t, tile_f = tile_of(tl.program_id(0), T, F, BLOCK_T, BLOCK_F, GROUP)
    row = tile_t.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    out = tile_f * BLOCK_F + tl.arange(0, BLOCK_F)
    if TMA:
        gu = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
        for start in range(0, C, BLOCK_C):
            gu = tl.dot(g_ptr.load([tile_t * BLOCK_T, start]), w2_ptr.load([start, tile_f * BLOCK_F]), gu)
    else:
        step = tl.arange(0, BLOCK_C)
        gu = product(
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
    mask = (row < T)[:, None] & (out < F)[None, :]
    at = (row * F)[:, None] + out[None, :]
    slope = tl.load(q_ptr + at, mask=mask, other=0).to(tl.float32) * STEP + LOW
    tl.store(gu_ptr + at, (gu * slope).to(gu_ptr.dtype.element_ty), mask=mask)


def _linear_gelu_backward_launch(g: Tensor, w2: Tensor, q: Tensor) -> Tensor:
    gu = torch.empty(q.shape, dtype=g.dtype, device=g.device)
    grad, weight = as_rows(g), as_rows(w2)
    (rows, channels), features = grad.shape, weight.shape[1]
    tma = is_hopper(g) and has_tensor_map(grad, weight)
    block_t, block_f, block_c, warps, stages = tile_config(rows, features, grad, weight)
    if tma and block_f == 128:  # of 128 columns, the sums and their bytes leave registers for one program
        block_f, stages = 64, 4
    if gu.numel():
        with on_device(g):
            _linear_gelu_backward_kernel[(triton.cdiv(rows, block_t) * triton.cdiv(features, block_f),)](
                gu,
                in_tiles(grad, tma, block_t, block_c),
                in_tiles(weight, tma, block_c, block_f),
                q.contiguous(),
                grad.stride(0),
                weight.stride(0),
                rows,
                features,
                channels,
                LOW=LOW,
                STEP=STEP,
                TMA=tma,
                EVEN_C=channels % block_c == 0,
                BLOCK_T=block_t,
                BLOCK_F=block_f,
                BLOCK_C=block_c,
                GROUP=GROUP,
                num_warps=warps,
                num_stages=stages,
                maxnreg=registers("_linear_gelu_backward_kernel", warps, g) if tma else None,
            )
    return gu


@torch.library.custom_op("vtk_kernels::linear_gelu_backward", mutates_args=())
def _op(g: Tensor, w2: Tensor, q: Tensor) -> Tensor:
    _check(g, w2, q)
    return (_linear_gelu_backward_launch if runs_kernel(g) else linear_gelu_backward_ref)(g, w2, q).contiguous()


@_op.register_fake
def _(g: Tensor, w2: Tensor, q: Tensor) -> Tensor:
    return g.new_empty(q.shape)


def linear_gelu_backward(g: Tensor, w2: Tensor, q: Tensor, *, use_triton: bool | None = None) -> Tensor:
    """Compute the gradient of the input of GELU from the gradient of fc2's output.

    Args:
        g: (..., C), floating point; may be strided.
        w2: (C, F), the type of ``g``: the weight of fc2.
        q: (..., F), uint8: GELU′ from `linear_gelu` with ``save_grad``.
        use_triton: None: the kernel on CUDA in fp16 and bf16; False: torch; True: the kernel.

    Returns:
        (..., F), contiguous, the type of ``g``.

    Raises:
        ValueError: shapes or types that do not fit, or ``use_triton=True`` where no kernel can run.
    """
    _check(g, w2, q)
    way = route(g, use_triton, w2)
    if way == "reference":
        return linear_gelu_backward_ref(g, w2, q)
    return (torch.ops.vtk_kernels.linear_gelu_backward if way == "operator" else _linear_gelu_backward_launch)(g, w2, q)


def _check(g: Tensor, w2: Tensor, q: Tensor) -> None:
    check_channels(g, "g")
    if w2.ndim != 2 or w2.shape[0] != g.shape[-1] or w2.dtype != g.dtype:
        raise ValueError(
            f"`w2` is {tuple(w2.shape)} {w2.dtype}; it must be ({g.shape[-1]}, F) {g.dtype}, the weight of fc2"
        )
    shape = (*g.shape[:-1], w2.shape[1])
    if q.shape != shape or q.dtype != torch.uint8:
        raise ValueError(
            f"`q` is {tuple(q.shape)} {q.dtype}; it must be {shape} torch.uint8, as `linear_gelu` gives it"
        )
