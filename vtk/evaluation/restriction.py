"""Scores a model among the classes that a test set has, as ImageNet-A and ImageNet-R are scored (``--restrict``).

Their 200 classes are a part of ImageNet's 1,000: the published code takes the most likely of the 200.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Predict = Callable[[Tensor], Tensor]


class Restriction:
    """Leaves only some classes to choose from.

    Args:
        labels: of the images; their classes are kept.
        classes: number of classes of the model.

    Attributes:
        count: classes that are kept.
    """

    def __init__(self, labels: Iterable[int], classes: int) -> None:
        self._absent = torch.ones(classes, dtype=torch.bool)
        self._absent[sorted({*labels})] = False
        self.count = classes - int(self._absent.sum())

    def wrap(self, predict: Predict) -> Predict:
        """Return ``predict`` with minus infinity as logits (B, classes) of the other classes."""

        def among(images: Tensor) -> Tensor:
            logits = predict(images)
            return logits.masked_fill(self._absent.to(logits.device), float("-inf"))

        return among
