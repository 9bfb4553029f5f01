"""The model that DINO trains: a backbone, and a head that compares its features with prototypes.

The head is that of Caron et al. 2021 (appendix C): three linear layers with GELU between them, L2 normalisation, and a
linear layer without bias whose rows are of unit length (weight normalisation): its outputs are K cosines.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vtk.models.crop_sizes import at_size
from vtk.models.initialization.draw import reset, reset_tensor
from vtk.training.pretrain.dino.views import WHOLE, Crops


class Prototypes(nn.Module):
    """A weight-normalised linear layer: (…, D) to (…, K), row k of the weights is g_k · v_k / ‖v_k‖.

    Args:
        width: D.
        count: K.
        unit: keep every g_k at 1; otherwise it is trained.
    """

    def __init__(self, width: int, count: int, *, unit: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))
        self.length = nn.Parameter(torch.ones(count, 1), requires_grad=not unit)
        reset_tensor(self.weight, "dino.prototypes")

    def forward(self, x: Tensor) -> Tensor:
        """Return the products with the prototypes."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        rows = F.normalize(self.weight.to(wide), dim=1) * self.length.to(wide)
        return F.linear(x, rows.to(x.dtype))


class DinoHead(nn.Module):
    """Features (N, C) to outputs (N, K).

    Args:
        width: C.
        hidden: width of the two hidden layers.
        bottleneck: D, width before the prototypes.
        prototypes: K.
        unit: see `Prototypes`.
    """

    def __init__(self, width: int, hidden: int, bottleneck: int, prototypes: int, *, unit: bool) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                reset(layer, "dino.linear")
        self.prototypes = Prototypes(bottleneck, prototypes, unit=unit)

    def forward(self, features: Tensor) -> Tensor:
        """Return the outputs."""
        outputs: Tensor = self.prototypes(F.normalize(self.mlp(features), dim=-1))
        return outputs


class DinoModel(nn.Module):
    """A backbone and its head, over packed views of images.

    Args:
        backbone: a timm model without a classifier, which gives (B, C) features.
        projection: over these; thrown away afterwards.
        crops: sizes of the views.
    """

    backbone: Any

    def __init__(self, backbone: nn.Module, projection: DinoHead, crops: Crops) -> None:
        super().__init__()
        self.backbone, self.projection, self.crops = backbone, projection, crops

    def forward(self, rows: Tensor, whole_only: bool = False) -> Tensor:
        """Return the outputs (V, B, K) of every view of packed images (B, numbers), or of the whole ones only.

        Views of a size go through the backbone together, all features through the head.
        """
        whole, small = self.crops.split(rows)
        features: list[Tensor] = [self.backbone(whole)]
        if self.crops.count and not whole_only:
            with at_size(self.backbone, self.crops.small):
                features.append(self.backbone(small))
        outputs: Tensor = self.projection(torch.cat(features))
        return outputs.unflatten(0, (WHOLE if whole_only else self.crops.views, len(rows)))

    def no_weight_decay(self) -> set[str]:
        """Return the parameters that the backbone names."""
        own: Any = getattr(self.backbone, "no_weight_decay", set)
        return {f"backbone.{name}" for name in own()}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's blocks in the backward pass."""
        self.backbone.set_grad_checkpointing(enable)


@contextlib.contextmanager
def without_noise(model: nn.Module) -> Iterator[None]:
    """Drop neither paths nor neurons inside of the context; BatchNorms stay in their mode, as the teacher's do."""
    training = [m for m in model.modules() if m.training and not isinstance(m, _BatchNorm)]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
