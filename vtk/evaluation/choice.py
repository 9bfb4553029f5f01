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
"""Numbers of a classifier with one label an image, and what people call them; what a card's ``metrics`` hold."""

MANY_LABELS: Mapping[str, str] = {"mAP": "mAP", "micro_f1": "micro F1", "macro_f1": "macro F1", "loss": "loss"}
"""Those of a classifier with any number of labels an image."""


def names(multi_label: bool) -> Mapping[str, str]:
    """Return the numbers of a kind of classifier."""
    return MANY_LABELS if multi_label else ONE_LABEL


def default(multi_label: bool) -> str:
    """Return the number that is looked at first: ``top1`` or ``mAP``."""
    return next(iter(names(multi_label)))


def rank(metric: str, numbers: Mapping[str, Any]) -> tuple[float, float]:
    """Return what is larger for a better epoch: the metric (a loss with its sign turned), then the lower loss."""
    value = float(numbers[metric])
    return (-value if metric == "loss" else value), -float(numbers["loss"])
