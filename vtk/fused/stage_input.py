"""Inputs of a stage: normalised tokens, or raw tokens with row statistics, whose norm the products apply.

LayerNorm without its affine part is (x − μ)/σ. Its centring is in the matrices, whose rows have mean 0
(`vtk.fused.fold.centred`): (x − μ)·Wᵀ = x·Wᵀ. What remains is 1/σ, one number for each row, which a product applies to
its sums, from statistics that the operation before left of the rows it wrote (`vtk_kernels.row_stats`). So no kernel
reads the residual stream only to normalise it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vtk_kernels.linear import linear
from vtk_kernels.linear_gelu import linear_gelu
from vtk_kernels.linear_residual import linear_residual

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RawTokens:
    """Tokens of the residual stream for products that normalise their sums.

    Attributes:
        x: (B, N, C).
        row_stats: (B, N, S, 2), of each row's pieces, fp32 (fp64 for fp64).
        eps: of the norm, added to the variance.
    """

    x: Tensor
    row_stats: Tensor
    eps: float

    def linear(self, w: Tensor, b: Tensor) -> Tensor:
        """Return LayerNorm(x) · wᵀ + b, (B, N, F); the rows of w (F, C) have mean 0."""
        return linear(self.x, w, b, self.row_stats, self.eps)

    def linear_gelu(self, w: Tensor, b: Tensor) -> Tensor:
        """Return GELU(LayerNorm(x) · wᵀ + b), (B, N, F); the rows of w (F, C) have mean 0."""
        return linear_gelu(self.x, w, b, row_stats=self.row_stats, eps=self.eps)


Reading = Tensor | RawTokens


def first(h: Reading, tokens: int | None) -> Reading:
    """Return the first so many tokens of every image; None for all."""
    if tokens is None:
        return h
    if isinstance(h, Tensor):
        return h[:, :tokens]
    return RawTokens(h.x[:, :tokens], h.row_stats[:, :tokens], h.eps)


def close_with_stats(
    x: Tensor, bias: Tensor, pairs: Sequence[Pair], splits: int = 1, counters: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return y = x + bias + Σ activation · matrixᵀ, and the statistics of its rows, by `linear_residual`.

    Args:
        x: residual stream (B, N, C).
        bias: (C).
        pairs: at least one, of an activation (B, N, K) and a matrix (C, K); all but the last are added to x before it.
        splits, counters: of `linear_residual`, for the last.
    """
    *before, (activation, matrix) = pairs
    for a, w in before:
        x = torch.addmm(x.flatten(0, 1), a.flatten(0, 1), w.t()).view(x.shape)
    return linear_residual(activation, matrix, bias, x, splits, counters)
