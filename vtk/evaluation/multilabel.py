"""Metrics of a classifier with several labels per image; a label is predicted where its sigmoid exceeds one half."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score
from torch import Tensor

from vtk import console
from vtk.errors import DataError, UsageError
from vtk.evaluation.choice import MANY_LABELS
from vtk.evaluation.metrics import batches_of_logits

_ROWS = 24


@dataclass(frozen=True)
class LabelRow:
    """One label: number of images, precision (NaN if never predicted), recall (NaN without images), F1, and average
    precision (NaN without images)."""

    name: str
    count: int
    precision: float
    recall: float
    f1: float
    average_precision: float


@dataclass(frozen=True)
class MultiLabelMetrics:
    """The result of `evaluate_labels`.

    Attributes:
        count: images.
        loss: mean binary cross-entropy over images and labels, in nats.
        table: (n, 5) fp64: of each label its true positives, false positives, false negatives, true negatives and
            average precision (NaN without images).
        classes: names in index order.
    """

    count: int
    loss: float
    table: np.ndarray
    classes: tuple[str, ...]

    @property
    def mAP(self) -> float:
        """Mean average precision over the labels that have images."""
        return float(np.nanmean(self.table[:, 4]))

    @property
    def micro_f1(self) -> float:
        """F1 over all pairs of an image and a label."""
        return _f1(*self.table[:, :3].sum(axis=0))

    @property
    def macro_f1(self) -> float:
        """Mean F1 over the labels that have images; 0 for a label that is never predicted."""
        rows = [row for row in self.table if row[0] + row[2] > 0]
        return float(np.mean([_f1(*row[:3]) for row in rows]))

    def numbers(self) -> dict[str, float]:
        """Return the overall metrics, by the names of `vtk.evaluation.choice`."""
        return {name: float(getattr(self, name)) for name in MANY_LABELS}

    def headline(self, metric: str) -> str:
        """Return the main numbers in one line."""
        return (
            f"mAP {console.percent(self.mAP)}, micro F1 {console.percent(self.micro_f1)}, macro F1 "
            f"{console.percent(self.macro_f1)}, loss {self.loss:.4f}"
        )

    def per_class(self) -> list[LabelRow]:
        """Return the row of every label, in index order."""
        rows = []
        for name, (tp, fp, fn, _, ap) in zip(self.classes, self.table.tolist(), strict=True):
            precision = tp / (tp + fp) if tp + fp else np.nan
            recall = tp / (tp + fn) if tp + fn else np.nan
            f1 = _f1(tp, fp, fn) if tp + fp + fn else np.nan
            rows.append(LabelRow(name, int(tp + fn), precision, recall, f1, ap))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; undefined ones as null."""
        rows = [{k: None if v != v else v for k, v in vars(row).items()} for row in self.per_class()]
        return {"count": self.count, **self.numbers(), "multi_label": True, "per_class": rows}

    def print(self) -> None:
        """Print the per-label table (the worst ones if there are many) and the main numbers."""
        rows, title = self.per_class(), "Per label"
        if len(rows) > _ROWS:
            seen = [row for row in rows if row.count]
            rows = sorted(seen, key=lambda row: (row.average_precision, row.name))[:_ROWS]
            title = f"Per label, the {len(rows)} of {len(self.classes)} with the lowest average precision"
        columns = ("label", "images", "precision", "recall", "F1", "AP")
        console.table(title, columns, [tuple(vars(row).values()) for row in rows])
        console.say(f"{self.headline('mAP')} on {console.count(self.count, 'image')}")


def _f1(tp: float, fp: float, fn: float) -> float:
    return float(2 * tp / (2 * tp + fp + fn)) if tp + fp + fn else 0.0


@torch.no_grad()
def evaluate_labels(
    predict: Callable[[Tensor], Tensor],
    loader: Iterable[tuple[Tensor, Tensor]],
    classes: Sequence[str],
    *,
    device: torch.device | str = "cpu",
    show_progress: bool = True,
) -> MultiLabelMetrics:
    """Run ``predict`` over ``loader`` and compute the metrics, which do not depend on the batch size.

    Args:
        predict: images (B, C, H, W) on ``device`` to logits (B, n).
        loader: pairs of images and labels (B, n) of zeros and ones.
        classes: n names in index order.
        device: of the images passed to ``predict``.
        show_progress: draw a progress bar.

    Raises:
        DataError: the loader is empty, or no image has a label.
        UsageError: logits and labels are not both (B, n).
    """
    n = len(classes)
    scores: list[Tensor] = []
    truth: list[Tensor] = []
    losses: list[Tensor] = []
    for logits, labels in batches_of_logits(predict, loader, device=device, show_progress=show_progress):
        if logits.shape != (len(labels), n) or labels.shape != logits.shape:
            raise UsageError(
                f"the model gives {tuple(logits.shape)} for labels of {tuple(labels.shape)}; both must be "
                f"({len(labels)}, {n})"
            )
        target = labels.to(logits.device, torch.float64, non_blocking=True)
        each = F.binary_cross_entropy_with_logits(logits.double(), target, reduction="none")
        losses.append(each.mean(dim=1))
        scores.append(logits)
        truth.append(labels)
    score, true = torch.cat(scores).cpu().numpy(), torch.cat(truth).numpy() > 0.5
    if not true.any():
        raise DataError("no held-out image has a label; hold out different images (--seed, --val-split)")
    given = score > 0
    counts = [(a & b).sum(axis=0) for a, b in ((true, given), (~true, given), (true, ~given), (~true, ~given))]
    # NaN cannot be ranked; the loss is not finite then either
    score = np.nan_to_num(score, nan=0.0)
    areas = [average_precision_score(true[:, i], score[:, i]) if true[:, i].any() else np.nan for i in range(n)]
    table = np.stack([*counts, np.asarray(areas)], axis=1).astype(np.float64)
    return MultiLabelMetrics(len(true), float(torch.cat(losses).mean()), table, tuple(classes))
