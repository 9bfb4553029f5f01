"""The perturbations of Table 9 of Hyeon-Woo et al. (2023), mIoU under them, and its interval over draws of noise."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from heads import mean_iou
from scipy import stats
from torch import Tensor, nn

from vtk.analysis.measures.accuracy import Change, Draws
from vtk.analysis.measures.noise import gaussian_blur, gaussian_noise, shot_noise

PHOTONS = 60  # of a white pixel: the weakest shot noise of Hendrycks and Dietterich (2019); the paper names no strength

PERTURBATIONS: dict[str, tuple[Change, int]] = {
    "clean": (lambda pixels, draws: pixels, 1),
    "shot noise": (partial(shot_noise, deviation=PHOTONS**-0.5), 5),
    "Gaussian noise, 5 of 255": (partial(gaussian_noise, deviation=5 / 255), 5),
    "Gaussian noise, 10 of 255": (partial(gaussian_noise, deviation=10 / 255), 5),
    "Gaussian blur, 1 px": (partial(gaussian_blur, deviation=1.0), 1),
    "Gaussian blur, 2 px": (partial(gaussian_blur, deviation=2.0), 1),
}
"""What is done to pixels (B, 3, H, W) from 0 to 1, and in how many draws."""


def measure(
    model: nn.Module, pixels: Tensor, masks: Tensor, classes: int, mean: Sequence[float], std: Sequence[float]
) -> dict[str, list[float]]:
    """Return mIoU for each perturbation and draw.

    Args:
        model: maps normalised images to logits (B, classes, H, W).
        pixels: (B, 3, H, W), from 0 to 1.
        masks: class numbers (B, H, W) int64.
        classes: number of classes.
        mean: of the normalisation, for each channel.
        std: likewise.
    """
    centre, spread = (pixels.new_tensor(value).view(3, 1, 1) for value in (mean, std))
    scores = {}
    for name, (change, count) in PERTURBATIONS.items():
        changed = (change(pixels, Draws(seed, 0, pixels)).clamp(0, 1) for seed in range(count))
        scores[name] = [mean_iou(model, (images - centre) / spread, masks, classes) for images in changed]
    return scores


def describe(scores: Sequence[float]) -> str:
    """Return a score, or the mean of several with its 95 % interval by Student's t, in percent."""
    mean = float(np.mean(scores))
    if len(scores) == 1:
        return f"{mean:.1%}"
    half = stats.t.ppf(0.975, len(scores) - 1) * stats.sem(scores)
    return f"{mean:.1%} ± {100 * half:.2f} points"
