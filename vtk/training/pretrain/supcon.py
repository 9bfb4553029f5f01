"""Supervised contrastive pre-training (Khosla et al. 2020): pulls images of a class together, all others apart.

Two augmented views of each image go through the backbone and a projection (two linear layers with a ReLU between them,
thrown away afterwards), and are compared by their cosines. The loss is the paper's equation 2, whose sum over positives
is outside of the logarithm. *When Vision Transformers outperform ResNets* trains ViTs this way with and without SAM
(appendix C): temperature 0.1, LAMB, ρ = 0.02, then a linear head.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk.card import InputSpec
from vtk.data.loading.loader import Transform
from vtk.errors import UsageError
from vtk.models.task_parameters import feature_width
from vtk.training.engine.gather_rows import gather_rows
from vtk.training.engine.processes import Ranks
from vtk.training.engine.step_rule import StepRule
from vtk.training.objectives.base import Batch
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.pretrain.method import Setting
from vtk.training.pretrain.similarity_plot import draw_similarity
from vtk.training.step_rules.radii import Kind


def supcon_loss(
    own: Tensor, labels: Tensor, every: Tensor, all_labels: Tensor, start: int, temperature: float
) -> Tensor:
    """Return equation 2's mean over the anchors that have a positive; 0 where none has one.

    Args:
        own: (n, D) of length 1, the anchors.
        labels: (n,) of the anchors.
        every: (N, D), all that anchors are compared with; the anchors are rows ``start`` to ``start + n``.
        all_labels: (N,).
        start: the first anchor's row.
        temperature: τ.
    """
    if len(every) < 2:  # the logarithm of an empty sum has no gradient
        return 0 * own.sum()
    logits = own @ every.T / temperature
    itself = torch.zeros_like(logits, dtype=torch.bool)
    itself[:, start : start + len(own)].fill_diagonal_(True)
    positive = (labels[:, None] == all_labels) & ~itself
    # an anchor is no part of its own denominator: A(i) is all but i
    log_p = logits - logits.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    count = positive.sum(1)
    has = count > 0
    each = -log_p.masked_fill(~positive, 0).sum(1) / count.clamp_min(1)
    return each.sum() / has.sum().clamp_min(1)


class TwoViews:
    """Two augmented views of one image: (2, C, H, W), with different random numbers."""

    def __init__(self, augment: Transform) -> None:
        self.augment, self.spec = augment, getattr(augment, "spec", None)

    def __call__(self, image: Any) -> Tensor:
        """Return both views."""
        return torch.stack([self.augment(image), self.augment(image)])


class Projected(nn.Module):
    """A backbone with a projection head: (B, V, C, H, W) to unit vectors (B, V, D), in fp32 or wider.

    Args:
        backbone: a timm model without a classifier, which gives (B, C) features.
        dim: D, of the projection; its hidden layer is as wide as the features.
    """

    def __init__(self, backbone: nn.Module, dim: int) -> None:
        super().__init__()
        width = feature_width(backbone)
        self.backbone = backbone
        self.projection = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, dim))

    def forward(self, images: Tensor) -> Tensor:
        """Project every view."""
        views = images.shape[:2]
        projections = self.projection(self.backbone(images.flatten(0, 1)))
        projections = projections.to(torch.promote_types(projections.dtype, torch.float32))
        return F.normalize(projections, dim=1).unflatten(0, views)

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that the backbone names."""
        own: Any = getattr(self.backbone, "no_weight_decay", set)
        return {f"backbone.{name}" for name in own()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's blocks in the backward pass."""
        switch: Any = self.backbone.set_grad_checkpointing
        switch(enable)


class Contrast:
    """The contrastive objective between all views of a batch, over all processes.

    Args:
        temperature: τ.
        ranks: this process and the others; in training each sees the images of all, so that the loss does not depend on
            how many there are.
    """

    def __init__(self, temperature: float, ranks: Ranks) -> None:
        self.temperature, self.ranks = temperature, ranks

    def start_epoch(self, seed: int) -> None:
        """Do nothing: the objective draws no random numbers."""

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch."""
        return batch

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Return the mean loss over this process's views, and the cosine between the views of an image."""
        projections = model(batch.images)
        own, labels = projections.flatten(0, 1), batch.labels.repeat_interleave(projections.shape[1])
        inner: Any = getattr(model, "module", model)
        # held-out batches are shared out whole, and some process may have none
        ranks = self.ranks if inner.training else Ranks(batch.images.device)
        every, start = gather_rows(own, ranks)
        all_labels, _ = gather_rows(labels, ranks)
        loss = supcon_loss(own, labels, every, all_labels, start, self.temperature)
        numbers: dict[str, Tensor | float] = {}
        if projections.shape[1] == 2:
            numbers["view_cosine"] = (projections[:, 0] * projections[:, 1]).sum(1).mean().detach()
        return loss, numbers


class OneView:
    """A single view of an image: (1, C, H, W)."""

    def __init__(self, plain: Transform) -> None:
        self.plain, self.spec = plain, getattr(plain, "spec", None)
        self.random = getattr(plain, "random", True)

    def __call__(self, image: Any) -> Tensor:
        """Return the view."""
        return self.plain(image)[None]


class SupCon:
    """The method. Held-out images have one view each, without augmentation; the positives of an image are its class."""

    labelled = True
    kind: Kind = "contrastive"

    def check(self, backbone: nn.Module, config: PretrainConfig, spec: InputSpec) -> None:
        """Refuse a backbone without features, and batches of one image.

        Raises:
            UsageError: the backbone has no features, or a batch is one image.
        """
        if config.batch_size < 2:
            raise UsageError(
                f"`--batch-size` is {config.batch_size}; --method supcon compares the images of a batch; give 2 or more"
            )
        if not getattr(backbone, "num_features", 0):
            raise UsageError(
                f"`--method supcon` needs features, which {type(backbone).__name__} does not have; give another model"
            )

    def transforms(self, augment: Callable[..., Transform], plain: Transform) -> tuple[Transform, Transform]:
        """Return the transforms to two training views, and to one held-out view."""
        return TwoViews(augment()), OneView(plain)

    def model(self, backbone: nn.Module, setting: Setting) -> nn.Module:
        """Return the backbone with a new projection."""
        self._settings = {"temperature": setting.config.supcon_temperature, "projection": setting.config.supcon_dim}
        return Projected(backbone, setting.config.supcon_dim)

    def objective(self, setting: Setting) -> Contrast:
        """Return the loss of equation 2."""
        return Contrast(setting.config.supcon_temperature, setting.ranks)

    def remarks(self, row: Mapping[str, float]) -> list[str]:
        """Return none."""
        return []

    def step_rule(self, model: nn.Module) -> StepRule | None:
        """Return None: steps are plain, or SAM's."""

    @torch.no_grad()
    def draw(self, model: nn.Module, images: Tensor, setting: Setting) -> None:
        """Draw the cosines between held-out images, ordered by class, into ``similarity.png``."""
        draw_similarity(model(images[:, None])[:, 0], "cosine of the projections", setting.out, "ordered by class")

    def numbers(self) -> dict[str, Any]:
        """Return temperature and projection width."""
        return self._settings
