"""Rows, or GELU of rows, in e4m3 with a scale each: the input of an fp8 product.

    v = x, or GELU(x);    s = max|v| / 448,    code = e4m3(v / s)

GELU by the error function. One program holds one row of C channels in registers, so that the scale is that of the whole
row. Elements moved per row: reads C, writes C bytes and one scale. See `vtk_kernels._e4m3` for the format.
"""

from typing import no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk_kernels._device import chained, follow, is_hopper
from vtk_kernels._dispatch import LAUNCHES, inference, on_device, route, runs_kernel
from vtk_kernels._e4m3 import E4M3, encode, encode_rows, row_scale
from vtk_kernels._gelu import gelu
from vtk_kernels._rows import as_rows, check_channels, load_row, row_config
from vtk_kernels._triton import tl, triton

LAUNCHES["quantize_rows"] = 1


def quantize_rows_ref(x: Tensor, gelu: bool = False) -> tuple[Tensor, Tensor]:
    """Compute `quantize_rows` by torch. Same arguments and results."""
    wide = x.float()
    return encode_rows(F.gelu(wide) if gelu else wide)


@triton.jit
@no_type_check
def _quantize_rows_kernel(
    code_ptr,  # out (T, C), bytes
    scale_ptr,  # out (T,), fp32
    x_ptr,  # (T, C)
    stride_xt,  # from a row of x to the next
    C,
    GELU: tl.constexpr,
    CONVERT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    row, channel, mask, v = load_row(x_ptr, stride_xt, C, BLOCK_C)
    if GELU:
        v = gelu(v)
    factor, scale = row_scale(v)
    tl.store(code_ptr + row * C + channel, encode(v * factor, CONVERT), mask=mask)
    tl.store(scale_ptr + row, scale)


def _quantize_rows_launch(x: Tensor, gelu: bool = False) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    rows = as_rows(x)
    block, warps = row_config(x.shape[-1])
    if scale.numel():
        with on_device(x):
            _quantize_rows_kernel[(scale.numel(),)](
                codes,
                scale,
                rows,
                rows.stride(0),
                x.shape[-1],
                GELU=gelu,
                CONVERT=is_hopper(x),
                BLOCK_C=block,
                num_warps=warps,
                **chained(x, scale.numel()),
            )
    return codes.view(E4M3), scale


@torch.library.custom_op("vtk_kernels::quantize_rows", mutates_args=())
def _quantize_rows_op(x: Tensor, gelu: bool = False) -> tuple[Tensor, Tensor]:
    _check(x)
    codes, scale = (_quantize_rows_launch if runs_kernel(x) else quantize_rows_ref)(x, gelu)
    return codes.contiguous(), scale.contiguous()


@_quantize_rows_op.register_fake
def _(x: Tensor, gelu: bool = False) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty(x.shape[:-1], dtype=torch.float32)


def quantize_rows(x: Tensor, *, gelu: bool = False, use_triton: bool | None = None) -> tuple[Tensor, Tensor]:
    """Round the rows of ``x``, or of GELU(x), to e4m3 with a scale each, for inference.

    Args:
        x: (..., C), floating point but not fp64; may be strided.
        gelu: of GELU(x).
        use_triton: None for the kernel on CUDA in fp16 and bf16; False for torch; True for the kernel.

    Returns:
        codes: (..., C), torch.float8_e4m3fn, contiguous.
        scale: (...), fp32: the row is about codes · scale; NaN where the row holds NaN or infinity.

    Raises:
        ValueError: a type that does not fit, or ``use_triton=True`` where no kernel can run.
    """
    _check(x)
    way = inference(route(x, use_triton), x)
    if way == "reference":
        return quantize_rows_ref(x, gelu)
    return (torch.ops.vtk_kernels.quantize_rows if way == "operator" else _quantize_rows_launch)(x, gelu)


def _check(x: Tensor) -> None:
    check_channels(x)
    if x.dtype == torch.float64:
        raise ValueError("`x` is float64; e4m3 is made of float32, float16 or bfloat16: cast it")
