"""Compares two models on the same images: the drop of a metric with its interval, and agreement."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch

from vtk import console
from vtk.evaluation.choice import MANY_LABELS, ONE_LABEL
from vtk.evaluation.intervals import NORMAL95, paired_difference, wilson
from vtk.packs.compression.answers import Answers

DropMetric = Literal["top1", "balanced_accuracy", "mAP"]

_RESAMPLES, _MOST_WORK = 1000, 500_000_000
_NO_CHANGE = 3.0
"""With no change in n images, the 95 % limit of its share is about 3 / n."""


@dataclass(frozen=True)
class Comparison:
    """A model after a change against the same model before it, on the same images.

    Attributes:
        images: their number.
        metric: that is compared.
        before: its value before the change, as a fraction.
        after: its value after the change.
        low: lower limit of the 95 % interval of the drop, before - after.
        high: upper limit.
        agreement: share of the images with the same most likely class; of several labels, with all decided alike.
        agreement_low: lower limit of its 95 % interval.
        agreement_high: upper limit.
        absent: classes that no image has: nothing is known of them.
    """

    images: int
    metric: DropMetric
    before: float
    after: float
    low: float
    high: float
    agreement: float
    agreement_low: float
    agreement_high: float
    absent: tuple[str, ...] = ()

    @property
    def drop(self) -> float:
        """Before - after, as a fraction."""
        return self.before - self.after

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "drop": self.drop, "absent": list(self.absent)}

    def __str__(self) -> str:
        name = {**ONE_LABEL, **MANY_LABELS}[self.metric]
        return (
            f"{name} {console.percent(self.before)} before, {console.percent(self.after)} after: drop "
            f"{points(self.drop)} points (95 % interval {points(self.low)} to {points(self.high)}); agreement "
            f"{console.percent(self.agreement)} (95 % interval {console.percent(self.agreement_low)} to "
            f"{console.percent(self.agreement_high)})"
        )


def points(fraction: float) -> str:
    """Return a difference of accuracies in percentage points."""
    return f"{100 * fraction:.2f}".replace("-0.00", "0.00").replace("-", "−")


def default_metric(multi_label: bool) -> DropMetric:
    """Return ``top1``, or of several labels ``mAP``."""
    return "mAP" if multi_label else "top1"


def value_of(answers: Answers, metric: DropMetric) -> float:
    """Return a metric of a model's answers."""
    if metric == "top1":
        return float((answers.decisions() == answers.labels).double().mean())
    return float(getattr(answers.metrics(), metric))


def agreement(before: Answers, after: Answers) -> int:
    """Return the number of images for which both models decide alike."""
    same = before.decisions() == after.decisions()
    return int((same.all(dim=1) if before.multi_label else same).sum())


def compare(before: Answers, after: Answers, metric: DropMetric) -> Comparison:
    """Compare two models' answers for the same images in the same order."""
    count, alike = len(before), agreement(before, after)
    low, high = _interval(before, after, metric)
    return Comparison(
        count, metric, value_of(before, metric), value_of(after, metric), low, high, alike / count,
        *wilson(alike, count), before.absent(),
    )  # fmt: skip


def _interval(before: Answers, after: Answers, metric: DropMetric) -> tuple[float, float]:
    if metric == "mAP":
        return _interval_of_precision(before, after)
    first, second = (answers.decisions() == answers.labels for answers in (before, after))
    lost, gained = first & ~second, second & ~first
    if metric == "top1":
        return paired_difference(int(lost.sum()), int(gained.sum()), len(before))
    return _interval_of_recall(before.labels, lost, gained)


def _interval_of_recall(labels: torch.Tensor, lost: torch.Tensor, gained: torch.Tensor) -> tuple[float, float]:
    """Combine the intervals of the classes' drops (Zou and Donner, 2008): that of a mean of independent estimates."""
    drops, lows, highs = [], [], []
    for label in labels.unique().tolist():
        mine = labels == label
        numbers = int((lost & mine).sum()), int((gained & mine).sum()), int(mine.sum())
        low, high = paired_difference(*numbers)
        drops.append((numbers[0] - numbers[1]) / numbers[2])
        lows.append(low)
        highs.append(high)
    drop, low_, high_ = (np.asarray(values) for values in (drops, lows, highs))
    down, up = (float(np.sqrt(np.sum((drop - end) ** 2))) / len(drop) for end in (low_, high_))
    return float(drop.mean()) - down, float(drop.mean()) + up


def _interval_of_precision(before: Answers, after: Answers) -> tuple[float, float]:
    """Return the normal interval of a drop of mAP, its deviation from resampled images; ± 3 / n images at least."""
    n, classes = before.logits.shape
    truth = before.labels.numpy() > 0.5
    resamples = int(np.clip(_MOST_WORK // max(1, n * classes), 50, _RESAMPLES))
    random = np.random.default_rng(0)
    weights = random.multinomial(n, np.full(n, 1 / n), size=resamples).astype(np.float64)
    with np.errstate(invalid="ignore"):
        first, second = (mean_precision(answers.logits.numpy(), truth, weights) for answers in (before, after))
    drops = (first - second)[np.isfinite(first - second)]  # a resample may hold no label at all
    whole = value_of(before, "mAP") - value_of(after, "mAP")
    deviation = float(drops.std(ddof=1)) if len(drops) > 1 else 0.0
    half = max(NORMAL95 * deviation, _NO_CHANGE / n)
    return max(-1.0, whole - half), min(1.0, whole + half)


def mean_precision(scores: np.ndarray, truth: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the mean average precision of weighted images, over the labels that have any.

    Args:
        scores: (n, classes).
        truth: (n, classes) booleans.
        weights: (resamples, n), how often each image counts.

    Returns:
        (resamples,); NaN where no label has an image.
    """
    total, present = np.zeros(len(weights)), np.zeros(len(weights))
    for label in np.flatnonzero(truth.any(axis=0)):
        order = np.argsort(-scores[:, label], kind="stable")
        ranked = scores[order, label]
        # images of equal score count at once: precision is that after the last of them
        ends = np.searchsorted(-ranked, -ranked, side="right") - 1
        all_ = np.cumsum(weights[:, order], axis=1)
        mine = weights[:, order] * truth[order, label]
        right = np.cumsum(mine, axis=1)
        count = right[:, -1]
        precision = right[:, ends] / np.maximum(all_[:, ends], 1e-300)
        average = np.where(count > 0, (mine * precision).sum(axis=1) / np.maximum(count, 1e-300), 0.0)
        total += average
        present += count > 0
    return total / np.where(present > 0, present, np.nan)
