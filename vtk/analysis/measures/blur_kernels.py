"""Blur kernels of fractional size in pixels, and convolution with one kernel per image."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def disc(radius: float, like: Tensor) -> Tensor:
    """Return the kernel (1, k, k) of a lens out of focus: a disc with a soft edge of one pixel; sums to 1."""
    y, x = _grid(radius + 0.5, like)
    return _normalised((radius + 0.5 - torch.hypot(x, y)).clamp(0, 1)[None])


def lines(length: float, thickness: float, angles: Tensor) -> Tensor:
    """Return kernels (B, k, k) of straight lines through the centre with soft edges of one pixel; each sums to 1.

    Args:
        length: pixels.
        thickness: pixels, 1 or more.
        angles: (B,) radians, from the x axis.
    """
    y, x = _grid(length / 2 + thickness, angles)
    cosine, sine = angles.cos()[:, None, None], angles.sin()[:, None, None]
    along, across = (x * cosine + y * sine).abs(), (y * cosine - x * sine).abs()
    inside = (length / 2 + 0.5 - along).clamp(0, 1) * (thickness / 2 + 0.5 - across).clamp(0, 1)
    return _normalised(inside)


def convolve(pixels: Tensor, kernels: Tensor) -> Tensor:
    """Return pixels (B, C, H, W) convolved with kernels (B or 1, k, k), edges mirrored; through the FFT.

    Sides of k beyond what an image can be mirrored by are cut off.
    """
    height, width = pixels.shape[-2:]
    reach = kernels.shape[-1] // 2
    rows, columns = min(reach, height - 1), min(reach, width - 1)
    kernels = kernels[:, reach - rows : reach + rows + 1, reach - columns : reach + columns + 1]
    kernels = _normalised(kernels) if rows < reach or columns < reach else kernels
    padded = F.pad(pixels, (columns, columns, rows, rows), mode="reflect")
    size = tuple(padded.shape[-2:])
    # circular, but what wraps around falls into the padding, which is cut off
    spectrum = torch.fft.rfft2(padded) * torch.fft.rfft2(kernels, s=size)[:, None]
    return torch.fft.irfft2(spectrum, s=size)[..., 2 * rows :, 2 * columns :]


def _grid(reach: float, like: Tensor) -> tuple[Tensor, Tensor]:
    steps = torch.arange(-math.ceil(reach), math.ceil(reach) + 1, dtype=like.dtype, device=like.device)
    return steps[:, None], steps[None, :]


def _normalised(kernels: Tensor) -> Tensor:
    return kernels / kernels.sum(dim=(-2, -1), keepdim=True)
