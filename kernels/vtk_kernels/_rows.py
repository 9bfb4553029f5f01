"""Parts shared by kernels with one program per row: rows of a tensor, launch settings, a row's load and LayerNorm."""

from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._triton import tl, triton


def as_rows(x: Tensor) -> Tensor:
    """Return ``x`` (..., C) as (rows, C) with neighbouring channels side by side.

    A view where strides allow one, such as ``tokens[:, :1]``, whose rows lie N·C apart; a copy otherwise.
    """
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


_ALIGNED = 16
"""Elements: whole sectors of memory, and what Triton takes for aligned."""


def aligned_length(channels: int) -> int:
    """Return the channels of a row that is stored in whole sectors."""
    return -(-channels // _ALIGNED) * _ALIGNED


def aligned_rows(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor like another one, not filled, whose rows start at whole sectors; contiguous if they end there.

    Rows of 2,730 channels (EVA-02 L) would start anywhere: no copy engine moves them, and threads move two bytes each.
    """
    *lead, channels = shape
    return torch.empty((*lead, aligned_length(channels)), dtype=like.dtype, device=like.device)[..., :channels]


def contiguous(x: Tensor | None) -> Tensor | None:
    """Return an optional operand as kernels without strides read it."""
    return None if x is None else x.contiguous()


def row_config(channels: int) -> tuple[int, int]:
    """Return (BLOCK_C, num_warps) for a program that holds a row of ``channels`` in registers.

    Eight elements a thread: one 16-byte load in half precision.
    """
    block = max(triton.next_power_of_2(channels), 16)
    return block, min(max(block // 256, 1), 16)


def check_channels(x: Tensor, name: str = "x") -> None:
    """Refuse what has no rows of channels; ``name`` is the argument's, for the message.

    Raises:
        ValueError: ``x`` is not floating point, or has no channel.
    """
    if not x.is_floating_point():
        raise ValueError(f"`{name}` must be floating point, not {x.dtype}")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"`{name}` needs at least one channel in its last dimension; its shape is {tuple(x.shape)}")


@triton.jit
@no_type_check
def load_row(x_ptr, stride_xt, C, BLOCK_C: tl.constexpr):
    """Return the program's row, its channels, which of them there are, and the row of ``x`` (T, C) in fp32."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_C)
    mask = channel < C
    return row, channel, mask, tl.load(x_ptr + row * stride_xt + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def normalise_row(v, mask, C, eps, RMS: tl.constexpr = False):
    """Return (v − mean) · rstd, with RMS v · rstd, and rstd of a row in fp32 registers; 0 outside ``mask``.

    The variance comes from the centred row: E[v²] − E[v]² would lose it where the mean is large.
    """
    if RMS:
        centred = tl.where(mask, v, 0.0)
    else:
        centred = tl.where(mask, v - tl.sum(v, 0) / C, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 0) / C + eps)
    return centred * rstd, rstd
