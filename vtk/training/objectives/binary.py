"""Binary cross-entropy where an image has one class: each class is a decision of its own, also of mixed images."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.models.task_parameters import head_names
from vtk.training.objectives.base import Batch, Classification, smooth


class Binary(Classification):
    """Binary cross-entropy of all classes, with timm's mixup and cutmix (Wightman et al. 2021, sec. 3.1).

    Args:
        num_classes: width of the logits.
        smoothing: fraction of the target spread evenly over all classes.
        threshold: targets above it are 1 and all others 0, so that both classes of a mixed image are present; None
            leaves them as mixing made them.
        total: take the sum over classes in place of the mean (the loss of Google's ViT code).
        mixup: see `Classification`.
        cutmix: see `Classification`.
        prob: see `Classification`.

    Raises:
        UsageError: smoothing lifts every class over the threshold, or holds all below it.
    """

    def __init__(
        self, num_classes: int, *, smoothing: float = 0.0, threshold: float | None = None, total: bool = False,
        mixup: float = 0.0, cutmix: float = 0.0, prob: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(num_classes, smoothing=smoothing, mixup=mixup, cutmix=cutmix, prob=prob)
        self.threshold, self.total = threshold, total
        off = smoothing / num_classes
        if threshold is not None and not off <= threshold < 1 - smoothing + off:
            raise UsageError(
                f"`--bce-threshold` {threshold:g}: --smoothing {smoothing:g} gives {num_classes} classes targets of "
                f"{off:.2g} and {1 - smoothing + off:.2g}, which it does not tell apart; give --smoothing 0"
            )

    def criterion(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean over images of the mean (or sum) over classes, of logits (B, classes), in fp32 or wider."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        labels = batch.labels
        targets = smooth(labels, self.num_classes, self.smoothing) if labels.ndim == 1 else labels
        if self.threshold is not None:
            targets = targets > self.threshold
        loss = F.binary_cross_entropy_with_logits(logits.to(wide), targets.to(wide))
        return loss * logits.shape[-1] if self.total else loss


@torch.no_grad()
def set_head_bias(model: nn.Module, value: float) -> None:
    """Start the classifier's biases at ``value``: sigmoid of a low one is near the share of a class among many.

    Raises:
        UsageError: the classifier has no bias.
    """
    heads = head_names(model)
    biases = [p for name, p in model.named_parameters() if name in heads and name.endswith("bias")]
    if not biases:
        raise UsageError(f"`--head-bias` {value:g}: the classifier of {type(model).__name__} has no bias")
    for bias in biases:
        bias.fill_(value)
