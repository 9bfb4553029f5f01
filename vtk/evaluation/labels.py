"""Turns logits into labels with probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vtk.card import Card
from vtk.errors import UsageError, VerificationError

UNKNOWN = "unknown"
"""Answer where the score is below the threshold."""


@dataclass(frozen=True)
class Prediction:
    """The most likely labels of one image, best first, with their calibrated softmax probabilities.

    For a multi-label model: the labels that reach the threshold, if any, with their sigmoids.

    Attributes:
        path: of the image; None of one in memory.
        labels: names of classes.
        scores: their probabilities.
        unknown: whether the first score is below the threshold of ``--threshold auto``.
    """

    path: Path | None
    labels: tuple[str, ...]
    scores: tuple[float, ...]
    unknown: bool = False

    @property
    def answer(self) -> str:
        """The most likely label, or "unknown"; empty where no label reaches a multi-label model's threshold."""
        return UNKNOWN if self.unknown else self.labels[0] if self.labels else ""


def predictions(
    card: Card, logits: Tensor, paths: Sequence[Path | None], *, top_k: int, threshold: float | str | None
) -> list[Prediction]:
    """Return the labels of images.

    Args:
        card: of the model; an answer below its ``threshold`` is unknown.
        logits: (images, classes), not yet divided by the card's temperature.
        paths: of the images.
        top_k: labels per image, for a model with one label per image.
        threshold: minimum probability of a label, for a multi-label model; None for 0.5.
    """
    if card.multi_label:
        return _above(logits, paths, card.classes, threshold if isinstance(threshold, float) else 0.5)
    return _top(card, logits, paths, top_k)


def check_threshold(card: Card, threshold: float | str | None, name: str) -> None:
    """Refuse a number as threshold of a model with one label per image; ``name`` is the model's.

    Raises:
        UsageError: such a threshold was given.
    """
    if not card.multi_label and threshold is not None and threshold != "auto":
        raise UsageError(
            f"`--threshold` is for multi-label models; {name} predicts one label per image: use --top-k, or "
            "--threshold auto, which chooses a score by --risk"
        )


def check_finite(logits: Tensor, what: str) -> None:
    """Refuse logits that are not finite: labels from them are meaningless.

    Raises:
        VerificationError: the logits of ``what`` are not finite.
    """
    if not bool(torch.isfinite(logits).all()):
        raise VerificationError(
            f"{what} gives logits that are infinite or NaN; the weights are damaged, or values overflow this "
            "precision: try --precision fp32"
        )


def probabilities(card: Card, logits: Tensor) -> Tensor:
    """Return the calibrated probabilities (images, classes), fp32, of a model with one label per image."""
    return (logits.float() / card.temperature).softmax(1)


def _top(card: Card, logits: Tensor, paths: Sequence[Path | None], k: int) -> list[Prediction]:
    classes, least = card.classes, -1.0 if card.threshold is None else card.threshold.score
    scores, indices = probabilities(card, logits).topk(min(k, len(classes)))
    return [
        Prediction(path, tuple(classes[i] for i in row), tuple(values), values[0] < least)
        for path, row, values in zip(paths, indices.tolist(), scores.tolist(), strict=True)
    ]


def _above(logits: Tensor, paths: Sequence[Path | None], classes: Sequence[str], least: float) -> list[Prediction]:
    """Return the labels of each image whose sigmoid is at least ``least``."""
    predictions = []
    for path, scores in zip(paths, logits.float().sigmoid(), strict=True):
        order = scores.argsort(descending=True, stable=True)
        kept = [int(i) for i in order if scores[i] >= least]
        predictions.append(Prediction(path, tuple(classes[i] for i in kept), tuple(float(scores[i]) for i in kept)))
    return predictions
