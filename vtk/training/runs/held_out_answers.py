"""A task's answers for its held-out images, from which its probabilities are calibrated."""

import numpy as np
from torch import Tensor

from vtk.calibration import Calibration
from vtk.evaluation.temperature import LEAST_IMAGES, calibrate
from vtk.packs.compression.halves import halve, label_sets
from vtk.training.runs.task import Task


class HeldOutAnswers:
    """Logits of one evaluation of all held-out images, in their order.

    Args:
        task: whose images they are; copies of one image are never divided between the two halves.
        seed: of the halves.
    """

    def __init__(self, task: Task, seed: int) -> None:
        self._audit, self._seed = task.audit, seed
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []
        self._found: Calibration | None = None

    def keep(self, logits: Tensor, labels: Tensor) -> None:
        """Take the logits (B, classes) and labels (B,) of the next batch."""
        self._parts.append((logits.detach().cpu().numpy(), labels.numpy()))

    def calibrate(self) -> Calibration | None:
        """Return the calibration, or None: several labels an image, one class, or too few images for two halves."""
        if self._parts and self._found is None:
            self._found = self._fit()
        return self._found

    def _fit(self) -> Calibration | None:
        count = sum(len(labels) for _, labels in self._parts)
        if count < LEAST_IMAGES or count != len(self._audit.val) or len(self._audit.classes) < 2:
            return None
        logits, labels = (np.concatenate(columns) for columns in zip(*self._parts, strict=True))
        if not np.isfinite(logits).all():
            return None
        keys = [self._audit.digests.get(sample.path) or str(sample.path) for sample in self._audit.val]
        halves = halve(label_sets(labels.tolist()), keys, self._seed)
        return calibrate(logits, labels, *halves) if all(halves) else None
