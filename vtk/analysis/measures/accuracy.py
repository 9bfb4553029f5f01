"""Accuracy on modified images: every modification sees the same images and the same random numbers."""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Required, TypedDict

import torch
from torch import Tensor, nn

from vtk import console
from vtk.analysis.measures.results import MeasureResult
from vtk.analysis.probes.batches import Batches, eval_mode, stream
from vtk.analysis.probes.share import ALONE, Share
from vtk.card import InputSpec
from vtk.data.loading.normalization import to_input, to_pixels
from vtk.data.loading.samplers import mix
from vtk.errors import UsageError


class Draws:
    """Random numbers for the images of one batch.

    Those of an image depend on the seed, its index and a name, but not on the batch size, the device or other
    measurements. Strengths of one change that use the same name share them, so that their curve is smooth.

    Attributes:
        first: index of the batch's first image.
    """

    def __init__(self, seed: int, first: int, like: Tensor) -> None:
        self.first = first
        self._seed, self._like = seed, like
        self._kept: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def normal(self, name: str, *shape: int) -> Tensor:
        """Return standard normal numbers (B, *shape), by default (B, C, H, W); drawn on the CPU in fp32."""
        return self._get("normal", torch.randn, name, shape)

    def uniform(self, name: str, *shape: int) -> Tensor:
        """Return numbers from 0 to 1 (B, *shape), by default (B, C, H, W); drawn on the CPU in fp32."""
        return self._get("uniform", torch.rand, name, shape)

    def poisson(self, name: str, rates: Tensor) -> Tensor:
        """Return Poisson counts of the rates (B, ...)."""
        pairs = zip(self._generators("poisson", name), rates.float().cpu(), strict=True)
        return torch.stack([torch.poisson(rate, generator=generator) for generator, rate in pairs]).to(self._like)

    def _get(self, kind: str, draw: Callable[..., Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
        shape = shape or tuple(self._like.shape[1:])
        key = (f"{kind} {name}", shape)
        if key not in self._kept:
            numbers = [draw(shape, generator=generator) for generator in self._generators(kind, name)]
            self._kept[key] = torch.stack(numbers).to(self._like)
        return self._kept[key]

    def _generators(self, kind: str, name: str) -> Iterator[torch.Generator]:
        stream_of = zlib.crc32(f"{kind} {name}".encode())
        for place in range(self.first, self.first + len(self._like)):
            yield torch.Generator().manual_seed(mix(self._seed, stream_of, place))


Change = Callable[[Tensor, Draws], Tensor]
"""Function from pixels (B, C, H, W), 0 to 1, to modified pixels of the same shape."""


@dataclass(frozen=True)
class Accuracies:
    """Accuracy of a model by change of its images.

    Attributes:
        clean: on the original images, as a fraction.
        changed: by name of the change, as a fraction.
        classes: number of outputs; chance is one over it.
        images: number of images.
    """

    clean: float
    changed: dict[str, float]
    classes: int
    images: int


@dataclass(frozen=True)
class Curve(MeasureResult):
    """Accuracy by strength of one change.

    Attributes:
        name: of the change.
        unit: of the strengths.
        strengths: in increasing order.
        accuracies: at each strength, as fractions.
    """

    name: str
    unit: str
    strengths: tuple[float, ...]
    accuracies: tuple[float, ...]


@dataclass(frozen=True)
class AccuracyCurves:
    """Accuracy of a model by strength of several changes.

    Attributes:
        clean: accuracy on the original images, as a fraction.
        curves: of each change.
        classes: number of outputs; chance is one over it.
        images: number of images.
    """

    clean: float
    curves: tuple[Curve, ...]
    classes: int
    images: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**vars(self), "curves": [curve.to_dict() for curve in self.curves]}


class AccuracyOptions(TypedDict, total=False):
    """Keywords of every measure of accuracy on changed images.

    Attributes:
        spec: mean and std of the model's input; required.
        seed: of the changes' random numbers; default 0.
        max_images: use only the first ones.
        share: this process's part, if several processes measure together.
        title: of the progress bar; empty for no bar.
    """

    spec: Required[InputSpec]
    seed: int
    max_images: int | None
    share: Share
    title: str


@torch.no_grad()
def accuracies(
    model: nn.Module,
    batches: Batches,
    changes: Mapping[str, Change],
    *,
    spec: InputSpec,
    seed: int = 0,
    clamp: bool = True,
    max_images: int | None = None,
    share: Share = ALONE,
    title: str = "",
) -> Accuracies:
    """Return the accuracy of a model, in eval mode, under each of several changes of the images.

    One pass over the images. Memory: one batch, its random numbers and its changed pixels with their spectra, about ten
    times the batch, and the model's activations.

    Args:
        model: classifier, (B, C, H, W) to (B, classes).
        batches: normalised images and labels (B,).
        changes: of pixels, by name.
        spec: mean and std of the model's input.
        seed: of the changes' random numbers.
        clamp: whether changed pixels are clipped to 0 and 1.
        max_images: use only the first ones.
        share: this process's part, if several processes measure together.
        title: of the progress bar; empty for no bar.

    Raises:
        UsageError: labels are not one number per image, or channels are not those of ``spec``.
        DataError: there are no images.
    """
    device = next(model.parameters()).device
    right = torch.zeros(len(changes), dtype=torch.int64, device=device)
    clean, seen, classes = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(3))
    with eval_mode(model), console.progress(title, max_images or 0, enabled=bool(title)) as bar:
        for first, images, labels in placed_batches(model, batches, max_images, share):
            pixels = to_pixels(images, spec)
            draws = Draws(seed, first, pixels)
            logits = logits_of(model, images, labels)
            clean += (logits.argmax(dim=1) == labels).sum()
            seen += len(labels)
            classes = torch.maximum(classes, torch.tensor(logits.shape[1], device=device))
            for number, change in enumerate(changes.values()):
                changed = change(pixels, draws)
                changed = changed.clamp(0, 1) if clamp else changed
                right[number] += (model(to_input(changed, spec)).argmax(dim=1) == labels).sum()
            bar.advance(len(labels) * share.world)
    counts = share.total(torch.cat([right, torch.stack([clean, seen, classes * (share.rank == 0)])])).tolist()
    *hits, right_clean, count, outputs = counts
    fractions = {name: number / count for name, number in zip(changes, hits, strict=True)}
    return Accuracies(right_clean / count, fractions, outputs, count)


def placed_batches(
    model: nn.Module, batches: Batches, max_images: int | None, share: Share
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield this process's batches on the model's device, each with the index of its first image.

    Raises:
        UsageError: labels are not one number per image.
        DataError: there are no images.
    """
    first = 0
    for number, (images, labels) in enumerate(stream(model, batches, max_images)):
        if labels.ndim != 1:
            raise UsageError(f"labels are {tuple(labels.shape)}; accuracy needs one class number for each image, (B,)")
        if number % share.world == share.rank:
            yield first, images, labels
        first += len(images)


def logits_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the model's logits (B, classes).

    Raises:
        UsageError: the output has another shape, or fewer classes than the labels need.
    """
    logits = model(images)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UsageError(f"{type(model).__name__} gives {shape}; accuracy needs logits (B, classes)")
    if int(labels.max()) >= logits.shape[1]:
        raise UsageError(f"labels reach {int(labels.max())}; {type(model).__name__} has {logits.shape[1]} outputs")
    return logits


def margin(images: int) -> float:
    """Return the half-width of the 95 % interval of an accuracy over so many images, at worst (one half)."""
    return 1.96 * math.sqrt(0.25 / images)


def remaining_lead(accuracy: float, clean: float, classes: int) -> float | None:
    """Return the share of its lead over chance that a model keeps: 1 is all of it, 0 none; None if it has no lead."""
    guess = 1 / max(classes, 1)
    return (accuracy - guess) / (clean - guess) if clean > guess else None
