"""Metrics by which a run can choose its best epoch; imports no torch."""

from collections.abc import Mapping
from typing import Any

ONE_LABEL: Mapping[str, str] = {
    "top1": "top-1",
    "top5": "top-5",
    "loss": "loss",
    "macro_f1": "macro F1",
    "balanced_accuracy": "balanced accuracy",
}
"""Metrics of a classifier with one label per image, with display names; the keys of a card's ``metrics``."""

MANY_LABELS: Mapping[str, str] = {"mAP": "mAP", "micro_f1": "micro F1", "macro_f1": "macro F1", "loss": "loss"}
"""Metrics of a classifier with several labels per image."""


def names(multi_label: bool) -> Mapping[str, str]:
    """Return the metrics of a kind of classifier."""
    return MANY_LABELS if multi_label else ONE_LABEL


def default(multi_label: bool) -> str:
    """Return the main metric: ``top1`` or ``mAP``."""
    return next(iter(names(multi_label)))


def rank(metric: str, numbers: Mapping[str, Any]) -> tuple[float, float]:
    """Return a sort key that is larger for a better epoch: the metric (a loss negated), then the negated loss."""
    value = float(numbers[metric])
    return (-value if metric == "loss" else value), -float(numbers["loss"])
