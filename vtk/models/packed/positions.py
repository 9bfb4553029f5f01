"""Positions that attention sees: rotary tables and additive biases, of one task and of the rows of a call."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowPositions:
    """Positions of packed rows.

    Attributes:
        rope: (L, 1 or H, R, D), fp32 (fp64 for fp64): a table for each attention of the model, or one for all; for each
            head, or one for all. Row r has the cosines of D/2 angles, then their sines; tokens without a position,
            cosines 1 and sines 0. None for no rotary embedding.
        rope_row: (T,) int32, each row's row of the table.
        bias: for each run of images, as many as the first number, of as many tokens as the second: (L, H, N, N), added
            to the scores.
    """

    rope: Tensor | None = None
    rope_row: Tensor | None = None
    bias: Sequence[tuple[int, int, Tensor]] = ()


def rotate(x: Tensor, table: Tensor, rotate_half: bool) -> Tensor:
    """Turn pairs of channels by the angles of each row (Su et al. 2021): (a, b) → (a cos − b sin, b cos + a sin).

    Args:
        x: (T, H, D).
        table: (T, 1 or H, D), cosines of D/2 angles, then sines.
        rotate_half: pairs are (i, i + D/2); else (2i, 2i + 1).

    Returns:
        (T, H, D), in the dtype of ``x``, computed in the wider of both.
    """
    cos, sin = table.chunk(2, -1)
    a, b = x.chunk(2, -1) if rotate_half else (x[..., ::2], x[..., 1::2])
    pair = (a * cos - b * sin, b * cos + a * sin)
    y = torch.cat(pair, -1) if rotate_half else torch.stack(pair, -1).flatten(-2)
    return y.to(x.dtype)
