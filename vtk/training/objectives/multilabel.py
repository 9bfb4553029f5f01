"""Training with any number of labels an image: one binary decision for each label."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.errors import UsageError
from vtk.training.objectives.base import Batch, Classification


class MultiLabel(Classification):
    """Binary cross-entropy, the mean over labels and images; with timm's mixup and cutmix.

    Label smoothing s turns targets t into t·(1 − s) + s / n, n labels, as timm's own does. ``weights`` multiply the
    loss of images that have a label against that of those without, whatever smoothing makes of both targets: a label
    costs t·w·BCE(target of 1) + (1 − t)·BCE(target of 0), t being the share of it in a mixed image. torch's
    ``pos_weight`` instead multiplies what smoothing gives the images *without* the label, too, and a rare label is then
    best predicted everywhere.

    Raises:
        UsageError: smoothing leaves targets that probability ½ does not tell apart.
    """

    def __init__(
        self, num_classes: int, *, smoothing: float = 0.0, mixup: float = 0.0, cutmix: float = 0.0, prob: float = 1.0,
        weights: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_classes, smoothing=smoothing, mixup=mixup, cutmix=cutmix, prob=prob, weights=weights)
        self.off = smoothing / num_classes
        self.on = 1 - smoothing + self.off
        if not self.off < 0.5 < self.on:
            raise UsageError(
                f"`--smoothing` {smoothing:g}: with --multi-label it gives {num_classes} labels targets of "
                f"{self.off:.2g} and {self.on:.2g}, which probability ½ does not tell apart; give 0.1 or less"
            )

    def prepare(self, batch: Batch) -> Batch:
        """Smooth labels, and mix pairs of images and their labels; in an odd batch the last one stays as it is."""
        images, labels = batch.images, batch.labels
        if self.weights is None:  # else smoothed where the weights are known to be of those that have a label
            labels = labels * (1 - self.smoothing) + self.smoothing / self.num_classes
        even = len(images) // 2 * 2
        if self._mix is not None and even:
            mix, part = self._mix, images[:even].clone()

            def draw() -> tuple[Tensor, Tensor]:
                share = mix._mix_batch(part)  # changes the images in place; returns the share of the first of a pair
                return part, torch.tensor(share)

            mixed, share = self._own_random(draw)
            images = torch.cat([mixed, images[even:]])
            pairs = labels[:even] * share + labels[:even].flip(0) * (1 - share)
            labels = torch.cat([pairs, labels[even:]])
        return Batch(images, labels, batch.stream)

    def criterion(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of logits (B, n), in fp32 or wider, of a batch that went through `prepare`."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = batch.labels.to(wide.dtype)
        if self.weights is None:
            return F.binary_cross_entropy_with_logits(wide, labels)
        self.weights = self.weights.to(wide)
        having, lacking = (
            F.binary_cross_entropy_with_logits(wide, torch.full_like(wide, target), reduction="none")
            for target in (self.on, self.off)
        )
        return (labels * self.weights * having + (1 - labels) * lacking).mean()


def positive_weights(labels: Sequence[np.ndarray], classes: int) -> list[float]:
    """Return images without a label / images with it, for each; 1 for a label that none or all have."""
    have = np.sum(labels, axis=0) if len(labels) else np.zeros(classes)
    lack = len(labels) - have
    return [float(n / h) if h and n else 1.0 for h, n in zip(have, lack, strict=True)]
