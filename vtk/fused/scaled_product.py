"""Tokens and matrices in e4m3 with a scale per row, and the product of the two.

    y[t, f] = s[t] · z[f] · Σₖ x[t, k] · w[f, k] + b[f],    x and w in e4m3, sums in fp32

On CUDA it is one product of cuBLASLt or CUTLASS (`torch._scaled_mm`). Elsewhere it is simulated: numbers of e4m3 are
multiplied in fp32, where every product is exact, so that a card's numbers are these up to the order of the sums.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk_kernels._e4m3 import E4M3

MULTIPLE = 16
"""Of which rows and columns of an fp8 product are multiples on CUDA."""


@dataclass(frozen=True)
class ScaledTokens:
    """Tokens in e4m3.

    Attributes:
        codes: (B, N, K), torch.float8_e4m3fn.
        scale: (B, N), fp32.
    """

    codes: Tensor
    scale: Tensor

    def first(self, tokens: int | None) -> "ScaledTokens":
        """Return the first so many tokens of every image; None for all."""
        return self if tokens is None else ScaledTokens(self.codes[:, :tokens], self.scale[:, :tokens])

    def decoded(self) -> Tensor:
        """Return the tokens (B, N, K) in fp32."""
        return self.codes.float() * self.scale[..., None]


class ScaledMatrix(nn.Module):
    """A matrix (F, K) in e4m3 with a scale for each of its rows; it keeps these types whatever the model is cast to.

    Attributes:
        codes: (F, K), bytes: torch would cast what it calls floating.
        scale: (F), fp32.
    """

    codes: Tensor
    scale: Tensor

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("codes", codes.contiguous().view(torch.uint8))
        self.register_buffer("scale", scale.contiguous())

    def forward(self, tokens: ScaledTokens, bias: Tensor) -> Tensor:
        """Return tokens · matrixᵀ + bias, (B, N, F), in the type of ``bias`` (F)."""
        w = self.codes.view(E4M3)
        if not w.is_cuda:
            sums = torch.matmul(tokens.codes.float(), w.float().t())
            return (sums * tokens.scale[..., None] * self.scale + bias.float()).to(bias.dtype)
        rows = tokens.codes.flatten(0, 1).contiguous()
        y = torch._scaled_mm(
            rows, w.t(), scale_a=tokens.scale.reshape(-1, 1), scale_b=self.scale[None], bias=bias, out_dtype=bias.dtype
        )
        return y.view(*tokens.codes.shape[:-1], -1)

    def decoded(self) -> Tensor:
        """Return the matrix (F, K) in fp32."""
        return self.codes.view(E4M3).float() * self.scale[:, None]

    def _apply(self, fn: Any, recurse: bool = True) -> "ScaledMatrix":
        moved = fn(self.scale)
        self.codes, self.scale = self.codes.to(moved.device), self.scale.to(moved.device)
        return self


def check_matrix(w: Tensor, where: str) -> None:
    """Refuse a matrix (F, K) that CUDA's fp8 products do not take.

    Raises:
        UsageError: its sides are not multiples of 16.
    """
    if any(side % MULTIPLE for side in w.shape):
        raise UsageError(
            f"`{where}` is a matrix of {w.shape[0]}×{w.shape[1]}, and fp8 products take multiples of {MULTIPLE}; "
            "use bf16"
        )
