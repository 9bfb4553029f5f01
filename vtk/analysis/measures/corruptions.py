"""Accuracy under common corruptions at five severities, after Hendrycks and Dietterich (2019)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

from torch import nn

from vtk.analysis.measures.accuracy import AccuracyOptions, Change, Curve, accuracies
from vtk.analysis.measures.pixel_corruptions import KINDS, corrupt
from vtk.analysis.probes.batches import Batches
from vtk.analysis.probes.share import check_keywords
from vtk.errors import UsageError

SEVERITIES = (1, 3, 5)


@dataclass(frozen=True)
class CorruptionAccuracy:
    """Accuracy by kind and severity of the corruption.

    Attributes:
        clean: accuracy without, as a fraction.
        kinds: accuracy by severity of every kind.
        groups: of every kind: ``noise``, ``blur``, ``weather`` or ``digital``.
        mean: over kinds and severities.
        relative: the mean as a share of ``clean``; None where that is 0.
        classes: number of outputs.
        images: number of images.
    """

    clean: float
    kinds: tuple[Curve, ...]
    groups: tuple[str, ...]
    mean: float
    relative: float | None
    classes: int
    images: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**vars(self), "kinds": [kind.to_dict() for kind in self.kinds], "groups": list(self.groups)}


def corruption_accuracy(
    model: nn.Module,
    batches: Batches,
    *,
    kinds: Sequence[str] = (),
    severities: Sequence[int] = SEVERITIES,
    **options: Unpack[AccuracyOptions],
) -> CorruptionAccuracy:
    """Return a model's accuracy under the corruptions of `KINDS`.

    They are the kinds of Hendrycks and Dietterich that need neither photographs (frost) nor slow loops over pixels
    (glass blur), made from formulas, torch, torchvision and Pillow, for images of any size and number of channels. They
    are not ImageNet-C's files or its code: numbers compare models with each other, not with published mean corruption
    errors.

    Memory: that of `vtk.analysis.measures.accuracy.accuracies`.

    Args:
        model: classifier.
        batches: normalised images and labels (B,).
        kinds: names in `KINDS`; by default all.
        severities: from 1 to 5.
        options: see `vtk.analysis.measures.accuracy.AccuracyOptions`.

    Raises:
        UsageError: a kind is unknown or a severity not from 1 to 5.
        DataError: there are no images.
    """
    check_keywords("corruption_accuracy", options, AccuracyOptions)
    chosen = tuple(dict.fromkeys(kinds)) or tuple(KINDS)
    if unknown := [kind for kind in chosen if kind not in KINDS]:
        raise UsageError(f"corruption {unknown[0]} is not known; choose {', '.join(KINDS)}")
    levels = sorted(set(severities))
    if not levels or not all(severity in range(1, 6) for severity in levels):
        raise UsageError(f"`severities` are {list(severities)}; give whole numbers from 1 to 5")
    changes: dict[str, Change] = {
        f"{kind} {severity}": partial(corrupt, kind=kind, severity=severity) for kind in chosen for severity in levels
    }
    accuracy = accuracies(model, batches, changes, **options)
    curves = tuple(
        Curve(kind, "severity", tuple(levels), tuple(accuracy.changed[f"{kind} {severity}"] for severity in levels))
        for kind in chosen
    )
    groups = tuple(KINDS[kind].group for kind in chosen)
    mean = sum(accuracy.changed.values()) / len(accuracy.changed)
    relative = mean / accuracy.clean if accuracy.clean else None
    return CorruptionAccuracy(accuracy.clean, curves, groups, mean, relative, accuracy.classes, accuracy.images)
