"""Accuracy under noise of one frequency band (Park and Kim 2022, section 2 and Figure 2b)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from vtk.analysis.measures.accuracy import AccuracyOptions, Change, Curve, Draws, accuracies
from vtk.analysis.probes.batches import Batches
from vtk.analysis.probes.share import check_keywords
from vtk.errors import UsageError

CENTRES = tuple(i / 10 for i in range(11))
WINDOW = 0.1
RMS = 0.1


@dataclass(frozen=True)
class FrequencyNoise:
    """Accuracy by frequency of the noise.

    Attributes:
        clean: accuracy without noise, as a fraction.
        bands: accuracy by centre of the band, in units of π per pixel (1 is the Nyquist frequency).
        window: width of the bands, in units of π.
        rms: of the noise, in units of the pixel range: of each band's where ``equal_power``, else of the white noise
            that bands are cut from.
        equal_power: whether all bands' noise is equally strong.
        classes: number of outputs.
        images: number of images.
    """

    clean: float
    bands: Curve
    window: float
    rms: float
    equal_power: bool
    classes: int
    images: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**vars(self), "bands": self.bands.to_dict()}


def frequency_noise(
    model: nn.Module,
    batches: Batches,
    *,
    centres: Sequence[float] = CENTRES,
    window: float = WINDOW,
    rms: float = RMS,
    equal_power: bool = True,
    **options: Unpack[AccuracyOptions],
) -> FrequencyNoise:
    """Return a model's accuracy on x + F⁻¹(F(δ) ⊙ M_f) for every centre frequency f, δ Gaussian.

    The mask M_f keeps the frequencies whose larger component, |ω_y| or |ω_x|, is within window/2 of f: square rings, as
    in Park and Kim's code, which reach the corners of the spectrum. They do not state the strength of
    the noise, and their code does not scale the bands, so that high bands, whose rings are longer, have stronger noise.
    With ``equal_power`` every image's noise has the same root mean square in every band, so that the curve separates
    frequency from strength. As in the paper, pixels are not clipped to 0 and 1: that would spread the noise over other
    frequencies.

    Memory: that of `vtk.analysis.measures.accuracy.accuracies`, and the spectrum of a batch.

    Args:
        model: classifier.
        batches: normalised images and labels (B,).
        centres: of the bands, in units of π, from 0 to 1.
        window: width of the bands, in units of π.
        rms: strength, see `FrequencyNoise`.
        equal_power: scale every band's noise to ``rms``.
        options: see `vtk.analysis.measures.accuracy.AccuracyOptions`.

    Raises:
        UsageError: a band has no frequency at this image size, or an option is out of range.
        DataError: there are no images.
    """
    check_keywords("frequency_noise", options, AccuracyOptions)
    if not centres or not all(0 <= centre <= 1 for centre in centres):
        raise UsageError(f"`centres` are {list(centres)}; give frequencies from 0 to 1, in units of π")
    if not (math.isfinite(window) and 0 < window <= 2) or not (math.isfinite(rms) and rms >= 0):
        raise UsageError(f"`window` is {window} and `rms` {rms}; give 0 to 2 (in units of π) and 0 or more")
    changes: dict[str, Change] = {
        f"{centre:g}": partial(_noisy, centre=centre, window=window, rms=rms, equal_power=equal_power)
        for centre in centres
    }
    accuracy = accuracies(model, batches, changes, clamp=False, **options)
    bands = Curve("band noise", "units of π per pixel", tuple(centres), tuple(accuracy.changed.values()))
    return FrequencyNoise(accuracy.clean, bands, window, rms, equal_power, accuracy.classes, accuracy.images)


def _noisy(pixels: Tensor, draws: Draws, *, centre: float, window: float, rms: float, equal_power: bool) -> Tensor:
    mask = band(pixels.shape[-2], pixels.shape[-1], centre, window).to(pixels.device)
    noise = cut(draws.normal("band"), mask)
    scale = noise.square().mean(dim=(1, 2, 3), keepdim=True).sqrt() if equal_power else 1.0
    return pixels + rms * noise / scale


def band(height: int, width: int, centre: float, window: float) -> Tensor:
    """Return the mask (height, width) of a band, True inside, in the order of `torch.fft.fft2`.

    Args:
        height: pixels.
        width: pixels.
        centre: in units of π per pixel.
        window: full width of the band, in units of π.

    Raises:
        UsageError: no frequency of an image of this size is in the band.
    """
    rows, columns = (2 * torch.fft.fftfreq(n, dtype=torch.float64).abs() for n in (height, width))
    radius = torch.maximum(rows[:, None], columns[None, :])
    mask = (radius - centre).abs() <= window / 2 + 1e-9  # a centre on the grid has both its neighbours or none
    if not bool(mask.any()):
        raise UsageError(
            f"images of {height}×{width} pixels have no frequency within {window / 2:g}π of {centre:g}π; their "
            f"frequencies are {2 / min(height, width):.3g}π apart: give a `window` of at least that"
        )
    return mask


def cut(noise: Tensor, mask: Tensor) -> Tensor:
    """Return the part of real noise (..., H, W) whose frequencies are inside the mask (H, W): F⁻¹(F(δ) ⊙ M)."""
    return torch.fft.ifft2(torch.fft.fft2(noise) * mask).real
