"""The transform ``add_smoothing``: a box blur at the end of the stages of a ResNet (Park and Kim 2022, appendix B).

Attention averages positions with learned weights; a box blur is its form without weights: the mean of each position and
its neighbours to the right and below, ¼ each. The paper (Figure 3a) puts it at the end of a stage, before the next one
subsamples. The published code has one after each of the four stages, by default after a tanh that bounds the map and a
ReLU: blur(relu(τ·tanh(x/τ))) with τ = 10. Its blur pads both sides with zeros, so that maps grow by one position; here
they keep their size, as windows of attention need it, and only the last row and column meet zeros.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from timm.models.resnet import ResNet
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.models.transforms.registry import register

Kind = Literal["blur", "tanh-blur"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TEMPERATURE = 10.0
"""τ of ``tanh-blur``, as in the published code."""
_KNOWN = "timm's ResNets (resnet*, resnetv2_*) and alternet_*, preact_resnet_*"


class SpatialSmoothing(nn.Module):
    """Box blur of 2×2 positions, which keeps the size of a map; no weights.

    Args:
        bounded: apply τ·tanh(x/τ) and ReLU first.
    """

    def __init__(self, bounded: bool = False) -> None:
        super().__init__()
        self.bounded = bounded

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C, H, W)."""
        if self.bounded:
            x = torch.relu(TEMPERATURE * torch.tanh(x / TEMPERATURE))
        return F.avg_pool2d(F.pad(x, (0, 1, 0, 1)), 2, 1)

    def extra_repr(self) -> str:
        """Show which form it is."""
        return "tanh-blur" if self.bounded else "blur"


@register("add_smoothing")
def add_smoothing(
    model: nn.Module, *, kind: str = "blur", stages: Sequence[int] | None = None
) -> dict[str, str | None]:
    """Append a box blur to stages of a ResNet, in place; no tensor changes, no name either.

    Args:
        model: timm's `ResNet` or `ResNetV2`, also with attention blocks.
        kind: ``blur``, or ``tanh-blur`` of the published code.
        stages: numbers of stages from 0; all by default.

    Returns:
        The map from the model's keys to themselves.

    Raises:
        UsageError: another model, a stage that is absent or repeated, or a model that has smoothing; the model is
            unchanged.
    """
    if kind not in KINDS:
        raise UsageError(f"`--spatial-smoothing` is {kind}; allowed is {', '.join(KINDS)}")
    sequences = _stages(model)
    chosen = list(range(len(sequences))) if stages is None else stages
    fits = isinstance(chosen, (list, tuple)) and chosen and all(type(i) is int for i in chosen)
    if not fits or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(len(sequences))):
        raise UsageError(f"`stages` is {stages!r}; give different numbers from 0 to {len(sequences) - 1}")
    for i in chosen:
        sequences[i].add_module("smoothing", SpatialSmoothing(kind == "tanh-blur").train(model.training))
    return {key: key for key in model.state_dict()}


def _stages(model: Any) -> list[nn.Sequential]:
    """Return the blocks of every stage."""
    name = type(model).__name__
    if any(isinstance(module, SpatialSmoothing) for module in model.modules()):
        raise UsageError(f"{name} already has smoothing; it is added once")
    if isinstance(model, ResNetV2):
        return [stage.blocks for stage in model.stages]
    if type(model) is ResNet:
        return [getattr(model, f"layer{i}") for i in range(1, 5)]
    raise UsageError(f"{name} cannot have smoothing at the end of its stages; supported are {_KNOWN}")
