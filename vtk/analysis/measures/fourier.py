"""Fourier amplitudes of feature maps, by depth (Park and Kim 2022, Figures 2a, 8 and D.2)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vtk.analysis.measures.results import MapsByDepth, UnitMap
from vtk.analysis.probes.batches import Batches
from vtk.analysis.probes.feature_maps import means_over_maps

EPSILON = 1e-6
"""Added to amplitudes before the logarithm, as in the paper's code."""


@dataclass(frozen=True)
class UnitSpectrum(UnitMap):
    """Spectrum of the feature map after a unit.

    Attributes:
        frequencies: along the half diagonal, in units of π per position: from 0 to just below 1.
        amplitudes: Δ log amplitude at each of them, in nats: mean of the logarithms minus that at frequency 0.
        high: the last amplitude, which Park and Kim plot at 1.0 π; None of a map with frequency 0 only.
    """

    frequencies: tuple[float, ...]
    amplitudes: tuple[float, ...]
    high: float | None


@dataclass(frozen=True)
class FeatureSpectra(MapsByDepth[UnitSpectrum]):
    """Spectra of a model's feature maps, by depth."""


def feature_spectra(model: nn.Module, batches: Batches, *, max_images: int | None = None) -> FeatureSpectra:
    """Return the Δ log amplitude after every residual unit, the model in eval mode.

    A(f) is the mean over images and channels of ln(|FFT2(map)| + 1e-6) at the frequency f of both axes (the half
    diagonal of the shifted transform), and Δ is A(f) − A(0): how much weaker a frequency is than the map's mean. As in
    the paper's code it is a mean of logarithms, not the logarithm of a mean. That code plots the last entry of the half
    diagonal at 1.0 π; on a map of even height h it is bin h/2 − 1, so 6/7 π of 14×14, and π itself, bin h/2, is not
    used. Ours is the same entry, with its true frequency beside it. Class and register tokens are left out.

    Memory: the transform of one unit's maps of one batch at a time.

    Args:
        model: of any kind that `vtk.analysis.probes.residual_units` supports. Unlike in the paper's notebook,
            BatchNorm uses its running statistics, and LayerScale is there.
        batches: images, labels unused. Maps need not be square; of others the half diagonal goes from the centre to the
            corner in steps of the shorter side.
        max_images: use only the first ones.

    Raises:
        UsageError: the model has no recognised blocks, or none has a map after it.
        DataError: there are no images.
    """
    means, without_map, images = means_over_maps(model, batches, log_amplitudes, max_images)
    rows = []
    for one in means:
        mean = one.mean.tolist()
        frequencies = tuple(2 * k / min(one.height, one.width) for k in range(len(mean)))
        delta = tuple(value - mean[0] for value in mean)
        high = delta[-1] if len(delta) > 1 else None
        rows.append(UnitSpectrum(one.unit.name, one.unit.kind, one.height, one.width, frequencies, delta, high))
    return FeatureSpectra(tuple(rows), without_map, images)


def log_amplitudes(maps: Tensor) -> Tensor:
    """Return ln(|FFT2| + 1e-6) of maps (B, C, H, W) at the frequencies of the half diagonal, (B, C, ⌈min(H, W)/2⌉).

    Entry k has k waves along the shorter side, and along the longer one the number nearest to the same frequency.
    The last entry is bin h/2 − 1 of an even side h, bin (h−1)/2 of an odd one.
    """
    height, width = maps.shape[-2:]
    side = min(height, width)
    bins = range((side + 1) // 2)
    rows = torch.tensor([round(k * height / side) for k in bins], device=maps.device)
    columns = torch.tensor([round(k * width / side) for k in bins], device=maps.device)
    half = torch.fft.rfft2(maps)  # real maps: all columns up to π are in it
    return (half[..., rows, columns].abs() + EPSILON).log()
