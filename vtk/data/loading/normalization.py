"""Normalisation by mean and standard deviation: pixel values to model inputs and back."""

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vtk.card import InputSpec
from vtk.data.decoding.bands import Bands
from vtk.errors import UsageError


def mean_and_std(
    spec: InputSpec, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel, both (C, 1, 1), in units of the pixel range."""
    mean, std = (torch.tensor(values, dtype=dtype, device=device)[:, None, None] for values in (spec.mean, spec.std))
    return mean, std


def to_pixels(images: Tensor, spec: InputSpec) -> Tensor:
    """Return normalised images (B, C, H, W) as pixel values from 0 to 1.

    Raises:
        UsageError: they have other channels than the input.
    """
    mean, std = _like(images, spec)
    return images * std + mean


def to_input(pixels: Tensor, spec: InputSpec) -> Tensor:
    """Return pixel values (B, C, H, W) from 0 to 1 normalised: (value - mean) / std.

    Raises:
        UsageError: they have other channels than the input.
    """
    mean, std = _like(pixels, spec)
    return (pixels - mean) / std


def _like(images: Tensor, spec: InputSpec) -> tuple[Tensor, Tensor]:
    if images.shape[-3] != len(spec.mean):
        raise UsageError(f"images have {images.shape[-3]} channels, the input's mean and std {len(spec.mean)}")
    return mean_and_std(spec, images.dtype, images.device)


class Normalize:
    """(value / 255 - mean) / std of an 8-bit image, as a (C, H, W) fp32 tensor.

    A lookup in a table of the 256 possible values per channel: bit-equal to torchvision's ToTensor and Normalize.
    """

    def __init__(self, spec: InputSpec) -> None:
        levels = torch.arange(256, dtype=torch.uint8).to(torch.float32).div(255)
        mean, std = mean_and_std(spec)
        self.grey = spec.in_chans == 1
        self.table: list[np.ndarray] = list(levels.sub(mean).div(std)[:, 0].numpy())

    def __call__(self, image: Image.Image | Bands) -> Tensor:
        """Normalise an RGB image (its luminance for one-channel models), or each of several channels."""
        if isinstance(image, tuple):
            planes = [np.asarray(band) for band in image]
        elif self.grey:
            planes = [np.asarray(image.convert("L"))]
        else:
            planes = list(np.moveaxis(np.asarray(image), 2, 0))
        out = np.empty((len(self.table), *planes[0].shape), dtype=np.float32)
        for c, (levels, plane) in enumerate(zip(self.table, planes, strict=True)):
            # 8-bit indices never wrap; "wrap" only skips NumPy's bounds check and buffer
            np.take(levels, plane, out=out[c], mode="wrap")
        return torch.from_numpy(out)
