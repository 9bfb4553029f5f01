"""Factors of a gated layer's gradient in eight bits: whole numbers with a scale for each piece of 64 of a row.

    a = SiLU(g),  c = v · SiLU′(g):    s = max|piece| / 127,    code = ⌊a / s + 128.5⌋,    a ≈ s · (code − 128)

g is the gate and v the value of y = SiLU(g) ⊙ v, so that gv = a ⊙ gy and gg = c ⊙ gy. Neither is bounded, as GELU′ is:
the scale of a piece is its own, and a large activation spoils 64 factors of one token at most. A factor is off by at
most half a scale, 1/254 of the largest in its piece. A token keeps 2 F + 8 ceil(F / 64) bytes, 2.125 F; autograd keeps
g, v and SiLU(g), 6 F in half precision.
"""

from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._triton import tl, triton
from vtk_kernels.row_stats import PIECE, pieces_of

LARGEST = 127.0
_LARGEST = tl.constexpr(LARGEST)


def encode_ref(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (..., F), uint8, and scales (..., S), the type of ``factors`` (..., F), S = ceil(F / 64)."""
    features, pieces = factors.shape[-1], pieces_of(factors.shape[-1])
    padded = torch.nn.functional.pad(factors, (0, pieces * PIECE - features)).unflatten(-1, (pieces, PIECE))
    scales = padded.abs().amax(-1) / LARGEST
    codes = (padded / torch.where(scales > 0, scales, 1.0)[..., None] + 128.5).floor().to(torch.uint8)
    return codes.flatten(-2)[..., :features], scales


def decode_ref(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the factors (..., F) of codes (..., F) and scales (..., S), in the type of the scales."""
    each = scales.repeat_interleave(PIECE, -1)[..., : codes.shape[-1]]
    return (codes.to(scales.dtype) - 128.0) * each


@triton.jit
@no_type_check
def encode(factors):
    """Return codes of (BLOCK_T, 64) factors in fp32 registers, 0 in columns outside, and scales (BLOCK_T,)."""
    scales = tl.max(tl.abs(factors), 1) / _LARGEST
    inverse = 1.0 / tl.where(scales > 0, scales, 1.0)
    return (factors * inverse[:, None] + 128.5).to(tl.uint8), scales


@triton.jit
@no_type_check
def decode(codes, scales):
    """Return the factors of codes (BLOCK_T, 64) and scales (BLOCK_T,), in fp32."""
    return (codes.to(tl.float32) - 128.0) * scales[:, None]
