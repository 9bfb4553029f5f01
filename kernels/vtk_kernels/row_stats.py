"""Statistics of rows in pieces, from which a product's epilogue takes LayerNorm's 1/σ (Ba, Kiros, Hinton, 2016).

    (x − μ) · Wᵀ = x · (W − mean over each row of W)ᵀ,  so that LayerNorm in front of a product is one factor per row.

`row_stats` (..., S, 2) holds of each piece of 64 neighbouring channels its mean and M2 = Σ (x − mean)²; S is C / 64,
rounded up, and the last piece may be shorter. Pieces are united as by Chan, Golub, LeVeque (Updating formulae and a
pairwise algorithm for computing sample variances, 1979), where sums of squares would cancel:

    μ = Σ n_s mean_s / C,    M2 = Σ (M2_s + n_s (mean_s − μ)²),    rstd = 1 / √(M2 / C + eps)

RMSNorm (Zhang, Sennrich, 2019) centres nothing, and takes the same statistics:

    mean(x²) = Σ (M2_s + n_s mean_s²) / C,    rstd = 1 / √(mean(x²) + eps)

A kernel that owns 64 columns of a tile writes their piece, and the next product unites them: no atomics, the same bits
every time.
"""

from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._dispatch import accumulator
from vtk_kernels._triton import tl, triton

PIECE = 64
"""Channels of a piece."""

MANY = 24
"""Most pieces of a row, 1,536 channels, whose statistics a product can load beside its sums without spilling."""

_PIECE = tl.constexpr(PIECE)


def pieces_of(channels: int) -> int:
    """Return S, the number of pieces of a row."""
    return -(-channels // PIECE)


def row_stats_ref(x: Tensor) -> Tensor:
    """Return the statistics of the rows of ``x`` (..., C): (..., S, 2) in fp32 (fp64 for fp64)."""
    wide = x.to(accumulator(x.dtype))
    channels, lead = x.shape[-1], x.shape[:-1]
    even = channels // PIECE * PIECE
    parts = [wide[..., :even].reshape(*lead, even // PIECE, PIECE), wide[..., even:].reshape(*lead, 1, channels - even)]
    found = []
    for part in parts if even < channels else parts[:1]:
        mean = part.mean(-1)
        found.append(torch.stack([mean, (part - mean[..., None]).square().sum(-1)], -1))
    return torch.cat(found, -2) if len(found) > 1 else found[0]


def rstd_ref(row_stats: Tensor, channels: int, eps: float, rms: bool = False) -> Tensor:
    """Return 1/√(variance + eps) of each row, of RMSNorm 1/√(mean square + eps).

    Args:
        row_stats: (..., S, 2).
        channels: C, of which S = ceil(C / 64).
        eps: added to the variance.
        rms: of RMSNorm.

    Returns:
        (...), the type of ``row_stats``.
    """
    mean, m2 = row_stats.unbind(-1)
    first = torch.arange(0, channels, PIECE, device=mean.device)
    size = (channels - first).clamp(max=PIECE).to(mean.dtype)
    if rms:
        return torch.rsqrt((m2 + size * mean.square()).sum(-1) / channels + eps)
    whole = (size * mean).sum(-1, keepdim=True) / channels
    return torch.rsqrt((m2 + size * (mean - whole).square()).sum(-1) / channels + eps)


def check_row_stats(x: Tensor, row_stats: Tensor | None, eps: float | None, rms: bool = False) -> None:
    """Refuse statistics that are not those of rows like ``x`` (..., C), or that come without ``eps``.

    Args:
        x: (..., C).
        row_stats: (..., S, 2), or None.
        eps: of the norm, or None.
        rms: whether it is RMSNorm.

    Raises:
        ValueError: another shape or type, or one of the three without the others.
    """
    if rms and row_stats is None:
        raise ValueError("`rms` says which norm `row_stats` are for; give `row_stats` and `eps` with it")
    if (row_stats is None) != (eps is None):
        raise ValueError(f"give `row_stats` and `eps` together; `{'eps' if eps is None else 'row_stats'}` is None")
    wanted, wide = (*x.shape[:-1], pieces_of(x.shape[-1]), 2), accumulator(x.dtype)
    if row_stats is not None and (row_stats.shape != wanted or row_stats.dtype != wide):
        raise ValueError(
            f"`row_stats` is {tuple(row_stats.shape)} {row_stats.dtype}; it must be {wanted} {wide}, mean and M2 of "
            f"each {PIECE} channels"
        )


@triton.jit
@no_type_check
def store_piece(
    stats_ptr,  # out (T, pieces, 2), fp32
    y,  # (BLOCK_T, 64) in fp32, 0 in columns from `width` on
    row,  # (BLOCK_T,), int64
    T,
    piece,
    pieces,
    width,  # columns of the piece, at most 64; none for a piece outside the matrix, where nothing is stored
):
    """Store mean and M2 of each row of a piece."""
    mean = tl.sum(y, 1) / tl.maximum(width, 1)
    apart = tl.where((tl.arange(0, _PIECE) < width)[None, :], y - mean[:, None], 0.0)
    at = stats_ptr + 2 * (row * pieces + piece)[:, None] + tl.arange(0, 2)[None, :]
    mask = (row < T) & (width > 0)  # no branch: the loop around it is flattened
    tl.store(at, tl.join(mean, tl.sum(apart * apart, 1)), mask=mask[:, None])


@triton.jit
@no_type_check
def _unite(mean, m2, at, mask, piece, size, RMS: tl.constexpr):
    """Add a piece, stored at a pointer per row, to mean and M2 of the pieces before it, with RMS to M2 about 0."""
    before = piece * _PIECE
    if RMS:
        other = tl.load(at + 2 * piece, mask=mask, other=0.0)
        return mean, m2 + tl.load(at + 2 * piece + 1, mask=mask, other=0.0) + other * other * size
    part = size / (before + size)
    apart = tl.load(at + 2 * piece, mask=mask, other=0.0) - mean
    m2 += tl.load(at + 2 * piece + 1, mask=mask, other=0.0) + apart * apart * (part * before)
    return mean + apart * part, m2


@triton.jit
@no_type_check
def load_rstd(
    stats_ptr,  # (T, PIECES, 2), fp32
    stride_st,  # from the pieces of a row to those of the next
    row,  # (BLOCK_T,), int64
    T,
    C,
    eps,
    PIECES: tl.constexpr,
    AT_ONCE: tl.constexpr,  # pieces that are loaded at a time, in a loop; 0 for all and no loop, to be inside another
    RMS: tl.constexpr,
):
    """Return 1/√(variance + eps) of a block of rows, with RMS 1/√(mean square + eps): (BLOCK_T,) in fp32.

    A tile of rows and pieces would be shorter to write, but draw the sums of the product into a layout of its own.
    """
    at = stats_ptr + row * stride_st
    mask = row < T
    mean = tl.load(at, mask=mask, other=0.0)
    m2 = tl.load(at + 1, mask=mask, other=0.0)
    if RMS:
        m2 += mean * mean * tl.minimum(C, _PIECE)
    if AT_ONCE > 1:
        for first in tl.range(1, PIECES, AT_ONCE, num_stages=1):
            for i in tl.static_range(AT_ONCE):
                size = tl.maximum(tl.minimum(C - (first + i) * _PIECE, _PIECE), 0)  # none past the last piece
                mean, m2 = _unite(mean, m2, at, mask & (size > 0), first + i, size, RMS)
    elif AT_ONCE == 1:
        for piece in tl.range(1, PIECES, num_stages=1):
            mean, m2 = _unite(mean, m2, at, mask, piece, tl.minimum(C - piece * _PIECE, _PIECE), RMS)
    else:
        for piece in tl.static_range(1, PIECES):
            mean, m2 = _unite(mean, m2, at, mask, piece, tl.minimum(C - piece * _PIECE, _PIECE), RMS)
    return tl.rsqrt(m2 / C + eps)
