"""Residual addition and the LayerNorm (no affine) of the sum, which is left in e4m3 with a scale per row.

    y = x + r,    v = LayerNorm(y) before y is rounded to the type of x,    s = max|v| / 448,    code = e4m3(v / s)

`add_norm` for an fp8 product: the normalised rows never exist in another type. One program holds one row of C channels
in registers. Elements moved per row: reads 2 C, writes C, C bytes and one scale. The format: `vtk_kernels._e4m3`.
"""

from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._device import chained, follow, is_hopper
from vtk_kernels._dispatch import LAUNCHES, inference, on_device, route, runs_kernel
from vtk_kernels._e4m3 import E4M3, encode, encode_rows, row_scale
from vtk_kernels._rows import as_rows, check_channels, load_row, normalise_row, row_config
from vtk_kernels._triton import tl, triton
from vtk_kernels.norm import norm_ref

LAUNCHES["add_norm_e4m3"] = 1


def add_norm_e4m3_ref(x: Tensor, r: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `add_norm_e4m3` by torch. Same arguments and results."""
    total = x.float() + r.float()
    return total.to(x.dtype), *encode_rows(norm_ref(total, eps)[0])


@triton.jit
@no_type_check
def _add_norm_e4m3_kernel(
    y_ptr,  # out (T, C)
    code_ptr,  # out (T, C), bytes
    scale_ptr,  # out (T,), fp32
    x_ptr,  # (T, C)
    r_ptr,  # (T, C)
    stride_xt,  # from a row of x to the next
    stride_rt,  # of r
    C,
    eps,
    CONVERT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    row, channel, mask, y = load_row(x_ptr, stride_xt, C, BLOCK_C)
    y += tl.load(r_ptr + row * stride_rt + channel, mask=mask, other=0.0).to(tl.float32)
    v, _ = normalise_row(y, mask, C, eps)
    factor, scale = row_scale(v)
    tl.store(y_ptr + row * C + channel, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(code_ptr + row * C + channel, encode(v * factor, CONVERT), mask=mask)
    tl.store(scale_ptr + row, scale)


def _add_norm_e4m3_launch(x: Tensor, r: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    rows, added, channels = as_rows(x), as_rows(r), x.shape[-1]
    block, warps = row_config(channels)
    if scale.numel():
        with on_device(x):
            _add_norm_e4m3_kernel[(scale.numel(),)](
                y,
                codes,
                scale,
                rows,
                added,
                rows.stride(0),
                added.stride(0),
                channels,
                float(eps),
                CONVERT=is_hopper(x),
                BLOCK_C=block,
                num_warps=warps,
                **chained(x, scale.numel()),
            )
    return y, codes.view(E4M3), scale


@torch.library.custom_op("vtk_kernels::add_norm_e4m3", mutates_args=())
def _add_norm_e4m3_op(x: Tensor, r: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, r)
    y, codes, scale = (_add_norm_e4m3_launch if runs_kernel(x) else add_norm_e4m3_ref)(x, r, eps)
    return y.contiguous(), codes.contiguous(), scale.contiguous()


@_add_norm_e4m3_op.register_fake
def _(x: Tensor, r: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=E4M3), scale


def add_norm_e4m3(x: Tensor, r: Tensor, eps: float, *, use_triton: bool | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Add ``r`` to ``x`` and round the sum's LayerNorm (no weight, no bias) to e4m3 with a scale per row.

    Args:
        x: (..., C), floating point but not fp64; may be strided.
        r: (..., C), the shape and the type of ``x``.
        eps: added to the variance.
        use_triton: None for the kernel on CUDA in fp16 and bf16; False for torch; True for the kernel.

    Returns:
        y: (..., C), x + r, contiguous, the type of ``x``.
        codes: (..., C), torch.float8_e4m3fn, contiguous: of the LayerNorm of y before rounding.
        scale: (...), fp32: the LayerNorm is about codes · scale; NaN where the row holds NaN or infinity.

    Raises:
        ValueError: shapes or types that do not fit, or ``use_triton=True`` where no kernel can run.
    """
    _check(x, r)
    way = inference(route(x, use_triton, r), x, r)
    if way == "reference":
        return add_norm_e4m3_ref(x, r, eps)
    return (torch.ops.vtk_kernels.add_norm_e4m3 if way == "operator" else _add_norm_e4m3_launch)(x, r, eps)


def _check(x: Tensor, r: Tensor) -> None:
    check_channels(x)
    if x.dtype == torch.float64:
        raise ValueError("`x` is float64; e4m3 is made of float32, float16 or bfloat16: cast it")
    if r.shape != x.shape or r.dtype != x.dtype:
        raise ValueError(
            f"`r` is {tuple(r.shape)} {r.dtype}; it must be like `x`, {tuple(x.shape)} {x.dtype}: expand or cast it"
        )
