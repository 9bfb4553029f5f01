"""The logits of a model for labelled images, from which every number of a comparison is computed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vtk import console
from vtk.errors import VerificationError
from vtk.evaluation.metrics import Metrics, evaluate
from vtk.evaluation.multilabel import MultiLabelMetrics, evaluate_labels


@dataclass(frozen=True, eq=False)
class Answers:
    """Logits of some images, with their labels.

    Attributes:
        logits: (n, classes) fp32.
        labels: (n,) class numbers, or (n, classes) zeros and ones where an image may have several labels.
        classes: names in index order.
    """

    logits: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def multi_label(self) -> bool:
        """Whether an image may have several labels."""
        return self.labels.ndim == 2

    def of(self, places: Sequence[int]) -> "Answers":
        """Return those of some of the images."""
        chosen = torch.as_tensor(places, dtype=torch.long)
        return Answers(self.logits[chosen], self.labels[chosen], self.classes)

    def metrics(self) -> Metrics | MultiLabelMetrics:
        """Return the metrics of an evaluation."""
        score: Callable[..., Metrics | MultiLabelMetrics] = evaluate_labels if self.multi_label else evaluate
        return score(lambda logits: logits, [(self.logits, self.labels)], self.classes, show_progress=False)

    def decisions(self) -> Tensor:
        """Return what the model says: (n,) its class, or (n, classes) the labels above one half."""
        return self.logits > 0 if self.multi_label else self.logits.argmax(dim=1)

    def absent(self) -> tuple[str, ...]:
        """Return the classes that no image has."""
        counts = self.labels.sum(0) if self.multi_label else self.labels.bincount(minlength=len(self.classes))
        return tuple(name for name, count in zip(self.classes, counts.tolist(), strict=True) if not count)


@torch.inference_mode()
def collect(
    predict: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    classes: tuple[str, ...],
    *,
    title: str,
    count: int,
) -> Answers:
    """Run a model over labelled images.

    Args:
        predict: images (B, C, H, W) to logits (B, classes).
        batches: images and labels.
        classes: names in index order.
        title: of the progress bar.
        count: images.

    Raises:
        VerificationError: logits that are not finite.
    """
    logits, labels = [], []
    with console.progress(title, count) as bar:
        for images, truth in batches:
            logits.append(predict(images).float().cpu())
            labels.append(truth)
            bar.advance(len(truth))
    found = torch.cat(logits)
    if not bool(found.isfinite().all()):
        raise VerificationError(f"{title}: logits are infinite or NaN; the weights are damaged, or values overflow")
    return Answers(found, torch.cat(labels), classes)
