"""Inputs of a stage: normalised tokens, or raw tokens with row statistics, whose norm the products apply.

LayerNorm without its affine part is (x − μ)/σ. Its centring is in the matrices, whose rows have mean 0
(`vtk.fused.fold.centred`): (x − μ)·Wᵀ = x·Wᵀ. RMSNorm has none. What remains is 1/σ, one number for each row, which a
product applies to its sums, from statistics that the operation before left of the rows it wrote
(`vtk_kernels.row_stats`). So no kernel reads the residual stream, or a hidden layer, only to normalise it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vtk.fused.norms import NormSpec, normalize
from vtk_kernels.linear import linear
from vtk_kernels.linear_gelu import linear_gelu
from vtk_kernels.linear_residual import linear_residual


@dataclass(frozen=True)
class RawTokens:
    """Tokens of the residual stream for products that normalise their sums.

    Attributes:
        x: (B, N, C).
        row_stats: (B, N, S, 2), of each row's pieces, fp32 (fp64 for fp64).
        norm: which they are still to get. Of a LayerNorm the rows of what they are multiplied by have mean 0.
    """

    x: Tensor
    row_stats: Tensor
    norm: NormSpec

    def linear(self, w: Tensor, b: Tensor) -> Tensor:
        """Return norm(x) · wᵀ + b, (B, N, F), for w (F, C)."""
        return linear(self.x, w, b, **self.options())

    def linear_gelu(self, w: Tensor, b: Tensor) -> Tensor:
        """Return GELU(norm(x) · wᵀ + b), (B, N, F), for w (F, C)."""
        return linear_gelu(self.x, w, b, **self.options())

    def options(self) -> dict[str, Any]:
        """Return the statistics and the norm as arguments of products."""
        return {"row_stats": self.row_stats, "eps": self.norm.eps, "rms": self.norm.kind == "rms"}


Reading = Tensor | RawTokens

Pair = tuple[Reading, Tensor]
"""An activation (B, N, K), which may still have to be normalised, and a matrix (C, K)."""


def first(h: Reading, tokens: int | None) -> Reading:
    """Return the first so many tokens of every image; None for all."""
    if tokens is None:
        return h
    if isinstance(h, Tensor):
        return h[:, :tokens]
    return RawTokens(h.x[:, :tokens], h.row_stats[:, :tokens], h.norm)


def normalized(h: Reading) -> Tensor:
    """Return normalised tokens, by a kernel of their own where they are not."""
    return h if isinstance(h, Tensor) else normalize(h.x, h.norm, True)


def close_with_stats(
    x: Tensor, bias: Tensor, pairs: Sequence[Pair], splits: int = 1, counters: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return y = x + bias + Σ activation · matrixᵀ, and the statistics of its rows, by `linear_residual`.

    Args:
        x: residual stream (B, N, C).
        bias: (C).
        pairs: at least one; all but the last are added to x before it.
        splits, counters: of `linear_residual`, for the last.
    """
    *before, (activation, matrix) = pairs
    for a, w in before:
        x = torch.addmm(x.flatten(0, 1), normalized(a).flatten(0, 1), w.t()).view(x.shape)
    if isinstance(activation, Tensor):
        return linear_residual(activation, matrix, bias, x, splits, counters)
    return linear_residual(activation.x, matrix, bias, x, splits, counters, **activation.options())
