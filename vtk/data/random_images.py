"""Draws smooth random images: with areas and few edges, as photographs have.

Plain noise excites a model and a filter unlike any photograph: its patches all look alike. Noise of a few cells per
side, interpolated to size, does not.
"""

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

_CELLS = 8
"""Cells of noise per side."""


def smooth_bytes(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return an RGB image (height, width, 3) uint8; drawn from ``rng``."""
    cells = Image.fromarray(rng.integers(0, 256, (_CELLS, _CELLS, 3), dtype=np.uint8))
    return np.asarray(cells.resize((width, height), Image.Resampling.BICUBIC))


def smooth_pixels(count: int, in_chans: int, size: tuple[int, int], *, seed: int) -> Tensor:
    """Return images (count, in_chans, height, width) fp32, each channel stretched over 0 to 1; ``size`` is H, W."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.rand((count, in_chans, _CELLS, _CELLS), generator=generator)
    pixels = functional.interpolate(cells, size=size, mode="bicubic", align_corners=False)
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    return (pixels - low) / (high - low).clamp_min(1e-6)
