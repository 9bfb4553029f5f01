"""Metrics of a classifier with one label per image."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from torch import Tensor

from vtk import console
from vtk.errors import DataError, UsageError
from vtk.evaluation.choice import ONE_LABEL

_ROWS = 24
_MIXED_UP = 5


@dataclass(frozen=True)
class ClassRow:
    """One class: number of images, precision (NaN if never predicted), recall (NaN without images), F1."""

    name: str
    count: int
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class Metrics:
    """The result of `evaluate`.

    Attributes:
        count: images.
        top1: fraction whose largest logit is the label's.
        top5: fraction whose label is among the min(5, classes) largest logits.
        loss: mean cross-entropy in nats.
        confusion: (n, n) int64 counts, [true, predicted].
        classes: names in index order.
    """

    count: int
    top1: float
    top5: float
    loss: float
    confusion: np.ndarray
    classes: tuple[str, ...]

    @property
    def macro_f1(self) -> float:
        """Mean F1 over the classes that have images; 0 for a class that is never predicted."""
        return float(np.mean([0.0 if row.f1 != row.f1 else row.f1 for row in self.per_class() if row.count]))

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall over the classes that have images: each class counts the same."""
        return float(np.mean([row.recall for row in self.per_class() if row.count]))

    def numbers(self) -> dict[str, float]:
        """Return the overall metrics, by the names of `vtk.evaluation.choice`."""
        return {name: float(getattr(self, name)) for name in ONE_LABEL}

    def headline(self, metric: str) -> str:
        """Return accuracy and loss in one line, preceded by ``metric`` if it is neither."""
        k = min(5, len(self.classes))
        own = "" if metric in ("top1", "top5", "loss") else f"{ONE_LABEL[metric]} "
        own += f"{console.percent(self.numbers()[metric])}, " if own else ""
        top5 = f"top-{k} {console.percent(self.top5)}, " if k < len(self.classes) else ""
        return f"{own}top-1 {console.percent(self.top1)}, {top5}loss {self.loss:.3f}"

    def per_class(self) -> list[ClassRow]:
        """Return precision, recall and F1 of every class, in index order."""
        return list(self._rows)

    @cached_property
    def _rows(self) -> tuple[ClassRow, ...]:
        n = len(self.classes)
        true, predicted = np.nonzero(self.confusion)
        scores = precision_recall_fscore_support(
            true, predicted, labels=np.arange(n), sample_weight=self.confusion[true, predicted], zero_division=np.nan
        )
        counts = self.confusion.sum(axis=1)
        return tuple(
            ClassRow(name, int(counts[i]), *(float(score[i]) for score in scores[:3]))
            for i, name in enumerate(self.classes)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; accuracies as fractions, undefined ones as null."""
        rows = [asdict(row) for row in self.per_class()]
        return {
            "count": self.count,
            **self.numbers(),
            "loss": self.loss if np.isfinite(self.loss) else None,
            "per_class": [{k: None if v != v else v for k, v in row.items()} for row in rows],
            "confusion": self.confusion.tolist(),
        }

    def print(self) -> None:
        """Print accuracies, the per-class table (the worst of many classes) and the most frequent confusions."""
        rows = self.per_class()
        title = "Per class"
        if len(rows) > _ROWS:
            seen = [row for row in rows if row.count]
            rows = sorted(seen, key=lambda row: (row.recall, row.name))[:_ROWS]
            title = f"Per class, the {len(rows)} of {len(self.classes)} with the lowest recall"
        cells = [(row.name, row.count, row.precision, row.recall, row.f1) for row in rows]
        console.table(title, ("class", "images", "precision", "recall", "F1"), cells)
        for true, predicted, count in self.mixed_up():
            console.say(f"{count} × {true} classified as {predicted}")
        k = min(5, len(self.classes))
        top5 = f", top-{k} {console.percent(self.top5)}" if k < len(self.classes) else ""
        console.say(
            f"top-1 {console.percent(self.top1)}{top5}, loss {self.loss:.4f} on {console.count(self.count, 'image')}"
        )
        if len({row.count for row in rows if row.count}) > 1:  # else the mean over classes equals that over images
            console.say(
                f"equal weight per class: balanced accuracy {console.percent(self.balanced_accuracy)}, macro F1 "
                f"{console.percent(self.macro_f1)}"
            )

    def mixed_up(self, limit: int = _MIXED_UP) -> list[tuple[str, str, int]]:
        """Return the most frequent confusions as (true class, predicted class, images)."""
        wrong = self.confusion.copy()
        np.fill_diagonal(wrong, 0)
        order = np.argsort(-wrong, axis=None, kind="stable")[:limit]
        cells = [np.unravel_index(i, wrong.shape) for i in order]
        return [(self.classes[t], self.classes[p], int(wrong[t, p])) for t, p in cells if wrong[t, p] > 0]


def batches_of_logits(
    predict: Callable[[Tensor], Tensor],
    loader: Iterable[tuple[Tensor, Tensor]],
    *,
    device: torch.device | str,
    show_progress: bool,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits of each batch, in fp32 on the model's device, with its labels.

    Raises:
        DataError: the loader is empty.
    """
    batches = 0
    with console.progress("eval", len(getattr(loader, "dataset", ())), enabled=show_progress) as bar:
        for images, labels in loader:
            yield predict(images.to(device, non_blocking=True)).to(torch.float32), labels
            batches += 1
            bar.advance(len(labels))
    if not batches:
        raise DataError("there are no images to evaluate; check the folder and its split")


@torch.no_grad()
def evaluate(
    predict: Callable[[Tensor], Tensor],
    loader: Iterable[tuple[Tensor, Tensor]],
    classes: Sequence[str],
    *,
    device: torch.device | str = "cpu",
    show_progress: bool = True,
    keep: Callable[[Tensor, Tensor], None] | None = None,
) -> Metrics:
    """Run ``predict`` over ``loader`` and compute the metrics.

    Logits are compared in fp32 and the loss is summed in fp64 over images, so the result does not depend on the batch
    size, except as far as ``predict`` itself does. The caller puts a model into eval mode.

    Args:
        predict: images (B, C, H, W) on ``device`` to logits (B, n).
        loader: pairs of images and labels (B,) int64.
        classes: n names in index order.
        device: of the images passed to ``predict``.
        show_progress: draw a progress bar.
        keep: called with the logits (B, n), fp32, and the labels (B,) of each batch, in order.

    Raises:
        DataError: the loader is empty.
        UsageError: the logits are not (B, n), or a label is not below n.
    """
    n = len(classes)
    k = min(5, n)
    true: list[Tensor] = []
    predicted: list[Tensor] = []
    near: list[Tensor] = []
    losses: list[Tensor] = []
    for logits, labels in batches_of_logits(predict, loader, device=device, show_progress=show_progress):
        if logits.ndim != 2 or logits.shape != (len(labels), n):
            raise UsageError(
                f"the model gives {tuple(logits.shape)} for {len(labels)} images of {n} classes; "
                f"its output must be ({len(labels)}, {n})"
            )
        if int(labels.min()) < 0 or int(labels.max()) >= n:
            raise UsageError(f"labels reach {int(labels.max())}; there are {n} classes")
        # on the model's device, and fetched once at the end: no wait per batch on a GPU
        target = labels.to(logits.device, non_blocking=True)
        best = logits.argmax(dim=1)
        within = (logits.topk(k, dim=1).indices == target[:, None]).any(dim=1)
        true.append(labels.cpu())
        predicted.append(best)
        near.append(within | (best == target))  # where logits tie, topk and argmax may choose differently
        losses.append(F.cross_entropy(logits.double(), target, reduction="none"))
        if keep is not None:
            keep(logits, labels)
    truth, guess = torch.cat(true).numpy(), torch.cat(predicted).cpu().numpy()
    return Metrics(
        count=len(truth),
        top1=float(np.mean(truth == guess)),
        top5=float(torch.cat(near).double().mean()),
        loss=float(torch.cat(losses).mean()),
        confusion=confusion_matrix(truth, guess, labels=np.arange(n)).astype(np.int64),
        classes=tuple(classes),
    )
