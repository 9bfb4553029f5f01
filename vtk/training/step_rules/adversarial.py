"""Fast adversarial training: one step of the sign of the gradient from a random start (Wong, Rice, Kolter, 2020).

    δ₀ ~ U(−ε, ε),    δ = clip(δ₀ + α · sign ∇L(x + δ₀), −ε, ε),    α = 1.25 ε

ε is the highest change of a pixel (the l∞ ball), and x + δ stays a picture: pixels from 0 to 1. Models see pixels less
the mean, divided by the standard deviation, so both are given to each channel in those units. Mixed images are mixed
first.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from vtk.card import InputSpec
from vtk.data.loading.normalization import mean_and_std
from vtk.errors import UsageError
from vtk.training.objectives.base import Batch

STEP = 1.25
"""α / ε."""


class Adversary:
    """Changes images against a model.

    Args:
        eps: highest change of a pixel, in 1/255 of its range.
        inputs: how the images of each stream were normalised.
    """

    def __init__(self, eps: float, inputs: Sequence[InputSpec]) -> None:
        self.eps, self.inputs = eps, inputs
        self._known: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, ...]] = {}

    def start(self, batch: Batch) -> Batch:
        """Return the batch with noise, drawn evenly from the ball; the images ask for a gradient."""
        radius, low, high = self._bounds(batch)
        noise = torch.empty_like(batch.images).uniform_(-1, 1) * radius
        images = _clamp(batch.images + noise, low, high)
        return dataclasses.replace(batch, images=images.requires_grad_())

    def attack(self, batch: Batch, started: Batch) -> Batch:
        """Return the batch against the model.

        Args:
            batch: as it was.
            started: from `start`, after a backward pass.

        Raises:
            UsageError: the loss has no gradient for the images.
        """
        gradient = started.images.grad
        if gradient is None:
            raise UsageError("`--adversarial`: the loss has no gradient for the images; leave it out")
        radius, low, high = self._bounds(batch)
        # torch's sign of NaN is 0; here it must not pass for an answer
        sign = torch.where(gradient.isfinite(), gradient.sign(), torch.nan)
        moved = started.images.detach() + STEP * radius * sign
        moved = _clamp(moved, batch.images - radius, batch.images + radius)
        return dataclasses.replace(batch, images=_clamp(moved, low, high))

    def _bounds(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return ε and the values of a pixel of 0 and of 1, each (C, 1, 1)."""
        like = batch.images
        key = batch.stream, like.dtype, like.device
        if key not in self._known:  # copied to the device once
            spec = self.inputs[batch.stream]
            mean, std = mean_and_std(spec, like.dtype)
            bounds = self.eps / 255 / std, (0 - mean) / std, (1 - mean) / std
            self._known[key] = tuple(bound.to(like.device) for bound in bounds)
        radius, low, high = self._known[key]
        return radius, low, high


def _clamp(images: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(images, low), high)
