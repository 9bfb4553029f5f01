"""Eight-bit floating point (e4m3) with a scale per row: the arithmetic that kernels and references share.

    s = max|row| / 448,    code = e4m3(row · (448 / max|row|)),    row ≈ s · code

e4m3 (Micikevicius et al., FP8 Formats for Deep Learning, 2022; ONNX's FLOAT8E4M3FN) has a sign, 4 bits of exponent and
3 of mantissa; 448 is the largest number, 2⁻⁹ the smallest, and there is no infinity. Values are rounded to the nearest
code, ties to the even one. Both quotients are rounded as IEEE 754 says and every product is one, so that a card, the
interpreter and torch on a CPU give the same bytes.

A row with NaN or infinity has the scale NaN and codes that mean nothing: what is made of it is NaN, and of no other
row. A row of zeros has the least scale, and codes 0.
"""

from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._triton import tl, triton

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST = 2.0**-100
"""Least maximum of a row that has a scale of its own: 448 divided by it is finite, and so is any product of scales."""

_LARGEST, _LEAST = tl.constexpr(LARGEST), tl.constexpr(LEAST)


def encode_rows(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes (..., C) and scales (...), fp32, of the rows of ``v`` (..., C), fp32, by torch."""
    largest = v.abs().amax(-1).clamp_min(LEAST)
    scale = torch.where(largest.isfinite(), largest / LARGEST, torch.nan)
    factor = torch.full_like(largest, LARGEST) / largest  # a number over a tensor would be rounded twice by torch
    # products are below 464, which is 448 in e4m3 by rounding; the codes of a row without a scale are 0
    return torch.where(scale.isnan()[..., None], 0.0, v * factor[..., None]).to(E4M3), scale


@triton.jit
@no_type_check
def row_scale(v):
    """Return 448 / max|v| and max|v| / 448 of a row in fp32 registers: factor of its codes, and their scale."""
    # NaN and infinity are the largest as integers, where a maximum of floats would pass NaN over
    bits = tl.max(tl.abs(v).to(tl.int32, bitcast=True), 0)
    largest = tl.maximum(bits.to(tl.float32, bitcast=True), _LEAST)
    finite = bits < 0x7F800000
    scale = tl.where(finite, tl.div_rn(largest, _LARGEST), float("nan"))
    return tl.where(finite, tl.div_rn(_LARGEST, largest), 0.0), scale


@triton.jit
@no_type_check
def encode(v, CONVERT: tl.constexpr):
    """Return the bytes of the e4m3 numbers nearest to v, of |v| below 464, in fp32 registers.

    Args:
        v: fp32.
        CONVERT: by the instruction of capability 9.0; otherwise in integers, for older cards and the interpreter,
            whose cast drops digits where it should round.
    """
    if CONVERT:
        return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = v.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # below 2⁻⁶ codes are multiples of 2⁻⁹: the sum with 2¹⁴, whose last bit that is, rounds to one
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    # above, the exponent's bias is 7 in place of 127, and 20 bits of mantissa go
    usual = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < 0x3C800000, small, tl.minimum(usual, 0x7E))
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
