"""Common corruptions of pixels at five severities, after Hendrycks and Dietterich (2019)."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vtk.analysis.measures.accuracy import Draws
from vtk.analysis.measures.blur_kernels import convolve, disc, lines
from vtk.analysis.measures.noise import gaussian_noise, shot_noise

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SIDE = 224  # pixels: lengths of a severity are for images of this side, and shrink or grow with it


Levels = tuple[float, float, float, float, float]
Change = Callable[[Tensor, Draws, float], Tensor]


@dataclass(frozen=True)
class Corruption:
    """One kind.

    Attributes:
        group: ``noise``, ``blur``, ``weather`` or ``digital``.
        levels: its parameter at severities 1 to 5; what it is says ``change``.
        change: ``change(pixels, draws, level)``.
    """

    group: str
    levels: Levels
    change: Change


def corrupt(pixels: Tensor, draws: Draws, kind: str, severity: int) -> Tensor:
    """Return pixels (B, C, H, W), 0 to 1, corrupted; severity 0 leaves them as they are.

    Args:
        pixels: of any number of channels; all channels of an image get the same blur and weather.
        draws: random numbers of these images.
        kind: a name in `KINDS`.
        severity: from 0 to 5.
    """
    one = KINDS[kind]
    return one.change(pixels, draws, one.levels[severity - 1]).clamp(0, 1) if severity else pixels


def _scale(pixels: Tensor) -> float:
    return min(pixels.shape[-2:]) / _SIDE


def _impulse_noise(pixels: Tensor, draws: Draws, share: float) -> Tensor:
    """A share of the values becomes black or white, half of it each."""
    drawn = draws.uniform("impulse noise")
    return torch.where(drawn < share / 2, 0.0, torch.where(drawn > 1 - share / 2, 1.0, pixels))


def _defocus_blur(pixels: Tensor, draws: Draws, radius: float) -> Tensor:
    """Convolution with a disc; ``radius`` in pixels at side 224."""
    return convolve(pixels, disc(radius * _scale(pixels), pixels))


def _motion_blur(pixels: Tensor, draws: Draws, length: float) -> Tensor:
    """Convolution with a line within 45° of the horizontal; ``length`` in pixels at side 224."""
    angles = (draws.uniform("motion blur", 1).flatten() - 0.5) * (torch.pi / 2)
    return convolve(pixels, lines(length * _scale(pixels), 1.0, angles))


def _zoom_blur(pixels: Tensor, draws: Draws, factor: float) -> Tensor:
    """Mean of the image at eight zooms from 1 to ``factor``."""
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as tv

    zooms = torch.linspace(1, factor, 8).tolist()
    fixed: dict[str, Any] = {
        "angle": 0.0,
        "translate": [0, 0],
        "shear": [0.0],
        "interpolation": InterpolationMode.BILINEAR,
    }
    return torch.stack([tv.affine(pixels, scale=zoom, **fixed) for zoom in zooms]).mean(dim=0)


def _fog(pixels: Tensor, draws: Draws, density: float) -> Tensor:
    """Haze with clouds, (x + density·haze)/(1 + density); haze is noise of amplitude 1/f², from 0.4 to 1."""
    height, width = pixels.shape[-2:]
    rows, columns = torch.fft.fftfreq(height) * height, torch.fft.rfftfreq(width) * width
    radius = torch.hypot(rows[:, None], columns[None, :]).clamp_min(1).to(pixels)
    spectrum = torch.fft.rfft2(draws.normal("fog", height, width)) / radius**2
    haze = torch.fft.irfft2(spectrum, s=(height, width))[:, None]
    low, high = haze.amin(dim=(-2, -1), keepdim=True), haze.amax(dim=(-2, -1), keepdim=True)
    haze = 0.4 + 0.6 * (haze - low) / (high - low).clamp_min(1e-12)
    return (pixels + density * haze) / (1 + density)


def _snow(pixels: Tensor, draws: Draws, cover: float) -> Tensor:
    """White streaks that fall aslant over a paled image; ``cover`` is about the share of pixels that they hide."""
    scale, shape = _scale(pixels), pixels.shape[-2:]
    length, thickness = max(12 * scale, 2.0), max(2.5 * scale, 1.0)
    flakes = (draws.uniform("snow", *shape) < cover / (length * thickness)).to(pixels)[:, None]
    angles = torch.pi * (0.3 + 0.4 * draws.uniform("direction of snow", 1).flatten())
    streaks = (convolve(flakes, lines(length, thickness, angles)) * length * thickness).clamp(0, 1)
    paled = pixels + 0.5 * cover * (1 - pixels)
    return 1 - (1 - paled) * (1 - 0.9 * streaks)


def _brightness(pixels: Tensor, draws: Draws, added: float) -> Tensor:
    """The largest channel grows by ``added``, to 1 at most, the others in proportion: the value in HSV."""
    value = pixels.amax(dim=1, keepdim=True)
    lifted = (value + added).clamp_max(1)
    return torch.where(value > 0, pixels * lifted / value.clamp_min(1e-12), lifted)


def _contrast(pixels: Tensor, draws: Draws, factor: float) -> Tensor:
    """Differences from each channel's mean, times ``factor``."""
    mean = pixels.mean(dim=(-2, -1), keepdim=True)
    return mean + factor * (pixels - mean)


def _elastic(pixels: Tensor, draws: Draws, distance: float) -> Tensor:
    """Pixels move by a smooth random field; ``distance`` is its root mean square in pixels at side 224."""
    from torchvision.transforms.v2 import functional as tv

    height, width = pixels.shape[-2:]
    smooth = max(7 * _scale(pixels), 1.0)
    size = [2 * min(round(3 * smooth), side - 1) + 1 for side in (width, height)]
    field = draws.normal("elastic", 2, height, width)
    for kernel in ([size[0], 1], [1, size[1]]):
        field = tv.gaussian_blur(field, kernel, [smooth, smooth])
    field = field / field.square().mean(dim=(1, 2, 3), keepdim=True).sqrt() * distance * _scale(pixels)
    unit = torch.tensor([[1.0, 0, 0], [0, 1.0, 0]]).to(pixels).expand(len(pixels), 2, 3)
    grid = F.affine_grid(unit, list(pixels.shape), align_corners=False)
    moved = grid + field.permute(0, 2, 3, 1) * torch.tensor([2 / width, 2 / height]).to(pixels)
    return F.grid_sample(pixels, moved, mode="bilinear", padding_mode="reflection", align_corners=False)


def _pixelate(pixels: Tensor, draws: Draws, factor: float) -> Tensor:
    """Averaged down to ``factor`` of the size, and back in blocks."""
    height, width = pixels.shape[-2:]
    small = F.interpolate(pixels, [max(1, round(height * factor)), max(1, round(width * factor))], mode="area")
    return F.interpolate(small, [height, width], mode="nearest")


def _jpeg(pixels: Tensor, draws: Draws, quality: float) -> Tensor:
    """Written as JPEG of that quality and read again; where there are not three channels, each one as a grey image."""
    stored = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).cpu()
    parts = stored.permute(0, 2, 3, 1) if stored.shape[1] == 3 else stored.flatten(0, 1)
    read = torch.stack([torch.from_numpy(_through_jpeg(part.numpy(), int(quality))) for part in parts])
    images = read.permute(0, 3, 1, 2) if stored.shape[1] == 3 else read.view(stored.shape)
    return images.to(pixels) / 255


def _through_jpeg(image: "NDArray[np.uint8]", quality: int) -> "NDArray[np.uint8]":
    # Pillow's, as torchvision is about to drop its own
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=quality)
    with Image.open(file) as written:
        return np.array(written)


_BY_GROUP: dict[str, dict[str, tuple[Levels, Change]]] = {
    "noise": {
        "gaussian-noise": ((0.08, 0.12, 0.18, 0.26, 0.38), gaussian_noise),
        "shot-noise": ((0.13, 0.2, 0.29, 0.45, 0.58), shot_noise),
        "impulse-noise": ((0.03, 0.06, 0.09, 0.17, 0.27), _impulse_noise),
    },
    "blur": {
        "defocus-blur": ((3, 4, 6, 8, 10), _defocus_blur),
        "motion-blur": ((8, 12, 18, 26, 34), _motion_blur),
        "zoom-blur": ((1.11, 1.16, 1.21, 1.26, 1.31), _zoom_blur),
    },
    "weather": {
        "snow": ((0.1, 0.18, 0.26, 0.36, 0.48), _snow),
        "fog": ((1.0, 1.5, 2.0, 2.5, 3.0), _fog),
        "brightness": ((0.1, 0.2, 0.3, 0.4, 0.5), _brightness),
    },
    "digital": {
        "contrast": ((0.4, 0.3, 0.2, 0.1, 0.05), _contrast),
        "elastic": ((2, 3, 4, 5.5, 7), _elastic),
        "pixelate": ((0.6, 0.5, 0.4, 0.3, 0.25), _pixelate),
        "jpeg": ((25, 18, 15, 10, 7), _jpeg),
    },
}

KINDS: dict[str, Corruption] = {
    name: Corruption(group, levels, change)
    for group, kinds in _BY_GROUP.items()
    for name, (levels, change) in kinds.items()
}
"""The corruptions by name; levels where the formula is Hendrycks and Dietterich's are theirs."""
