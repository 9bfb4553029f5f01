"""Perturbed pictures, as in Table 9 of Hyeon-Woo et al. (2023), and the interval of a mean over draws of noise."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torchvision.transforms.v2.functional import gaussian_blur

Perturb = Callable[[Tensor, torch.Generator], Tensor]
PHOTONS = 60.0  # of a white pixel: the weakest of Hendrycks and Dietterich (2019); the paper does not name a strength


def shot_noise(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images of counted photons: Poisson(60·x) ÷ 60, cut off at white."""
    return (torch.poisson(images * PHOTONS, generator) / PHOTONS).clamp(0, 1)


def gaussian_noise(sigma: float) -> Perturb:
    """Return a function that adds noise of deviation ``sigma``, of 255, to each value, cut off at black and white."""
    return lambda images, generator: (
        images + torch.randn(images.shape, generator=generator) * sigma / 255
    ).clamp(0, 1)  # fmt: skip


def blur(sigma: float) -> Perturb:
    """Return a Gaussian blur of deviation ``sigma``, in pixels, over four deviations to either side."""
    side = 2 * round(4 * sigma) + 1
    return lambda images, generator: gaussian_blur(images, [side, side], [sigma, sigma])


PERTURBATIONS: dict[str, tuple[Perturb, int]] = {
    "clean": (lambda images, generator: images, 1),
    "shot noise": (shot_noise, 5),
    "Gaussian noise, 5 of 255": (gaussian_noise(5.0), 5),
    "Gaussian noise, 10 of 255": (gaussian_noise(10.0), 5),
    "Gaussian blur, 1 px": (blur(1.0), 1),
    "Gaussian blur, 2 px": (blur(2.0), 1),
}
"""What is done to images (B, 3, H, W) of values from 0 to 1, and how many draws are averaged."""


class Normalised(nn.Module):
    """A model of normalised images for images of values from 0 to 1."""

    def __init__(self, model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.model = model
        self.mean, self.std = (torch.tensor(value).view(3, 1, 1) for value in (mean, std))

    def forward(self, images: Tensor) -> Tensor:
        """Return what the model gives for images (B, 3, H, W)."""
        return self.model((images - self.mean) / self.std)


def describe(scores: Sequence[float]) -> str:
    """Return a score, or the mean of several with its 95 % interval by Student's t, in percent."""
    mean = float(np.mean(scores))
    if len(scores) == 1:
        return f"{mean:.1%}"
    spread = stats.t.ppf(0.975, len(scores) - 1) * stats.sem(scores)
    return f"{mean:.1%} ± {100 * spread:.2f} points"
