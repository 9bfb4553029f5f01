"""Rounds a matrix to e4m3 so that the errors cancel on its expected inputs (GPTQ).

Rounding each number by itself moves the outputs by E·x. Here columns are rounded one after the other, and what rounding
a column does to the outputs is taken back by the columns that are still to come, as well as the inputs' second moments
H = Σ x·xᵀ allow (Frantar et al., GPTQ, 2022: with U the upper Cholesky factor of H⁻¹, an error e in column j becomes
−e · U[j, k] / U[j, j] in column k > j).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vtk.fused.scaled_product import ScaledMatrix, ScaledTokens
from vtk_kernels._e4m3 import E4M3, LARGEST, encode_rows

_DAMPING = 0.01
"""Of the mean second moment, added to each: directions that the inputs hardly take must not carry errors."""

_BLOCK = 64
"""Columns whose errors reach the columns behind them in one product."""


def round_matrix(w: Tensor, inputs: Sequence[ScaledTokens] = ()) -> ScaledMatrix:
    """Round a matrix to e4m3, with a scale for each row that makes its largest number 448.

    Args:
        w: (F, K), fp32.
        inputs: what it will multiply; of fewer tokens than K, or none, each number is rounded by itself.
    """
    codes, scale = encode_rows(w)
    moments = _moments(w, inputs)
    if moments is not None:
        codes = _compensated(w / scale[:, None], moments)
    return ScaledMatrix(codes, scale)


def _moments(w: Tensor, inputs: Sequence[ScaledTokens]) -> Tensor | None:
    """Return Σ x·xᵀ with some damping, or None where the inputs say too little."""
    rows = [tokens.decoded().flatten(0, 1) for tokens in inputs]
    rows = [x[x.isfinite().all(1)] for x in rows]  # one bad image spoils no moment
    if sum(map(len, rows)) < w.shape[1]:
        return None
    moments = w.new_zeros(w.shape[1], w.shape[1])
    for x in rows:
        moments.addmm_(x.t(), x)
    mean = moments.diagonal().mean()
    moments.diagonal().add_(_DAMPING * mean)
    return moments if mean > 0 else None


def _compensated(w: Tensor, moments: Tensor) -> Tensor:
    """Round w (F, K), in units of its rows' scales, column by column, and return the codes."""
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(moments)), upper=True)
    left, codes = w.clone(), torch.empty(w.shape, dtype=E4M3, device=w.device)
    for start in range(0, w.shape[1], _BLOCK):
        end = min(start + _BLOCK, w.shape[1])
        part, own = left[:, start:end], factor[start:end, start:end]
        errors = torch.empty_like(part)
        for j in range(end - start):
            rounded = part[:, j].clamp(-LARGEST, LARGEST).to(E4M3)
            codes[:, start + j] = rounded
            errors[:, j] = (part[:, j] - rounded.float()) / own[j, j]
            part[:, j + 1 :].addr_(errors[:, j], own[j, j + 1 :], alpha=-1)
        left[:, end:].addmm_(errors, factor[start:end, end:], alpha=-1)
    return codes
