"""Accuracy with the centre of every image hidden (Hyeon-Woo et al. 2023, Table 8)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

from torch import Tensor, nn

from vtk.analysis.measures.accuracy import AccuracyOptions, Change, Curve, Draws, accuracies
from vtk.analysis.probes.batches import Batches
from vtk.analysis.probes.share import check_keywords
from vtk.errors import UsageError

SIDES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)


@dataclass(frozen=True)
class OcclusionAccuracy:
    """Accuracy by size of the hidden centre.

    Attributes:
        clean: accuracy with nothing hidden, as a fraction.
        centre: accuracy by side of the hidden rectangle, as a fraction of the image's side; Hyeon-Woo et al.'s is 0.5.
        areas: share of the pixels that each of them hides.
        classes: number of outputs.
        images: number of images.
    """

    clean: float
    centre: Curve
    areas: tuple[float, ...]
    classes: int
    images: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**vars(self), "centre": self.centre.to_dict()}


def occlusion_accuracy(
    model: nn.Module,
    batches: Batches,
    *,
    sides: Sequence[float] = SIDES,
    **options: Unpack[AccuracyOptions],
) -> OcclusionAccuracy:
    """Return a model's accuracy with a centred rectangle of every image black.

    Hyeon-Woo et al. (2023) hide the centre 112×112 of 224×224 pixels with zeros: half of each side, a quarter of the
    area. The paper does not say whether
    zeros are pixels or normalised values; here they are pixels.

    Memory: that of `vtk.analysis.measures.accuracy.accuracies`.

    Args:
        model: classifier.
        batches: normalised images and labels (B,).
        sides: of the hidden rectangle as fractions of the image's sides, growing.
        options: see `vtk.analysis.measures.accuracy.AccuracyOptions`.

    Raises:
        UsageError: a side is not from 0 to 1.
        DataError: there are no images.
    """
    check_keywords("occlusion_accuracy", options, AccuracyOptions)
    if not sides or not all(0 <= side <= 1 for side in sides):
        raise UsageError(f"`sides` are {list(sides)}; give fractions of the image's side from 0 to 1")
    changes: dict[str, Change] = {f"{i}": partial(_hide, side=side) for i, side in enumerate(sides)}
    accuracy = accuracies(model, batches, changes, **options)
    spec = options["spec"]
    areas = tuple(_hidden(spec.height, side) * _hidden(spec.width, side) / (spec.height * spec.width) for side in sides)
    curve = Curve("centre hidden", "fraction of the image's side", tuple(sides), tuple(accuracy.changed.values()))
    return OcclusionAccuracy(accuracy.clean, curve, areas, accuracy.classes, accuracy.images)


def hide_centre(pixels: Tensor, side: float) -> Tensor:
    """Return pixels (B, C, H, W) with the centred rectangle of ``side`` times height and width, rounded, at 0."""
    height, width = pixels.shape[-2:]
    rows, columns = _hidden(height, side), _hidden(width, side)
    top, left = (height - rows) // 2, (width - columns) // 2
    hidden = pixels.clone()
    hidden[..., top : top + rows, left : left + columns] = 0
    return hidden


def _hide(pixels: Tensor, draws: Draws, *, side: float) -> Tensor:
    return hide_centre(pixels, side)


def _hidden(length: int, side: float) -> int:
    return round(length * side)
