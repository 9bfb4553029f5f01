"""Loss functions for the measures of curvature and flatness."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Loss(Protocol):
    """A mean loss over the images of a batch."""

    @property
    def weight_decay(self) -> float:
        """Factor of the l2 term ½·weight_decay·‖w‖², which is added outside the call because its Hessian is known."""

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss (scalar, with graph)."""


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy in fp32 or wider.

    Park and Kim (2022) use the training loss: augmented images, soft labels of mixup (give such batches) and the l2
    term. Its factor is written nowhere; ½·weight_decay·‖w‖² is the one whose gradient is weight_decay·w, as optimisers
    have it. Chen et al. (2022) take plain cross-entropy for all models, which is the default here.

    Attributes:
        smoothing: of labels given as class indices.
        weight_decay: factor of the l2 term.
    """

    smoothing: float = 0.0
    weight_decay: float = 0.0

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss."""
        logits = model(images)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        targets = labels if labels.ndim == 1 else labels.to(wide.dtype)
        return F.cross_entropy(wide, targets, label_smoothing=self.smoothing if labels.ndim == 1 else 0.0)


@dataclass(frozen=True)
class BinaryCrossEntropy:
    """Binary cross-entropy, averaged over classes and images, in fp32 or wider, for multi-label models.

    Attributes:
        weight_decay: factor of the l2 term, as in `CrossEntropy`.
    """

    weight_decay: float = 0.0

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss; labels are (B, classes) from 0 to 1."""
        logits = model(images)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.binary_cross_entropy_with_logits(wide, labels.to(wide.dtype))


@torch.no_grad()
def data_loss(loss: Loss, model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the loss over all images of the batches, without its l2 term."""
    total = sum(float(loss(model, images, labels)) * len(images) for images, labels in batches)
    return total / sum(len(images) for images, _ in batches)


@torch.no_grad()
def l2_term(model: nn.Module, weight_decay: float) -> float:
    """Return ½·weight_decay·‖w‖² over all parameters."""
    return 0.5 * weight_decay * sum(float(p.double().square().sum()) for p in model.parameters())


def mean_loss(loss: Loss, model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the loss over all images of the batches, the l2 term of all parameters included."""
    extra = l2_term(model, loss.weight_decay) if loss.weight_decay else 0.0
    return data_loss(loss, model, batches) + extra
