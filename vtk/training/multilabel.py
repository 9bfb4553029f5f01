"""Training with any number of labels an image: one binary decision for each label."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.training.objective import Batch, Classification


class MultiLabel(Classification):
    """Binary cross-entropy, the mean over labels and images; with timm's mixup and cutmix.

    Label smoothing s turns targets t into t·(1 − s) + s / n, n labels, as timm's own does. ``weights`` multiply the
    loss of images that have a label against that of those without.
    """

    def prepare(self, batch: Batch) -> Batch:
        """Smooth labels, and mix pairs of images and their labels; in an odd batch the last one stays as it is."""
        images, labels = batch.images, batch.labels * (1 - self.smoothing) + self.smoothing / self.num_classes
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
        """Return the mean binary cross-entropy of logits (B, n), in fp32 or wider."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        if self.weights is not None:
            self.weights = self.weights.to(logits.device, wide)
        return F.binary_cross_entropy_with_logits(logits.to(wide), batch.labels.to(wide), pos_weight=self.weights)


def positive_weights(labels: Sequence[np.ndarray], classes: int) -> list[float]:
    """Return images without a label / images with it, for each; 1 for a label that none or all have."""
    have = np.sum(labels, axis=0) if len(labels) else np.zeros(classes)
    lack = len(labels) - have
    return [float(n / h) if h and n else 1.0 for h, n in zip(have, lack, strict=True)]
