"""The transform ``change_mlp``: the FFN designs of Wang et al. 2022 (Table 5).

| design | change | in Table 5 |
|---|---|---|
| ``relu`` | ReLU in place of GELU | GELU→ReLU in ffn |
| ``bn`` | BatchNorm over all tokens between ``fc1`` and its activation | MLP→Conv1D+BN+GELU |
| ``no-norm`` | no norm before the FFN | LayerNorm removed in ffn |

Its fourth row, MLP→Conv1D+GELU, is timm's FFN: a convolution of width 1 along the tokens is a linear layer per token.
The text replaces the block of fc and activation, of which an FFN has one, so ``fc2`` has no BatchNorm here; the paper's
Algorithm 2, which would show it, is not in its text. In a VOLO, the table's other model, the FFNs of its encoder change
(Outlookers and transformers), and those of its class attention stay.
"""

from typing import Any, Literal, get_args

import timm.models.vision_transformer as vit
import torch
from timm.layers import Mlp
from timm.models import volo
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.models.structure import EXAMPLES
from vtk.models.transforms.registry import register

Design = Literal["relu", "bn", "no-norm"]


class TokenBatchNormAct(nn.Module):
    """BatchNorm per channel over images and tokens, then an activation; replaces the activation of an FFN.

    Args:
        channels: of the hidden layer.
        act: activation after it.
        device: of its tensors.
        dtype: of its tensors.

    Attributes:
        bn: `torch.nn.BatchNorm1d`.
        act: activation.
    """

    def __init__(
        self, channels: int, act: nn.Module, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(channels, device=device, dtype=dtype)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N, hidden), or (B, H, W, hidden) of a VOLO, to the same shape."""
        if x.ndim == 4:
            return self.forward(x.flatten(1, 2)).unflatten(1, x.shape[1:3])
        y: Tensor = self.act(self.bn(x.transpose(1, 2)).transpose(1, 2))
        return y


@register("change_mlp")
def change_mlp(model: nn.Module, *, design: Design) -> dict[str, str | None]:
    """Change the FFN of every block of a Vision Transformer or of a VOLO's encoder, in place.

    Args:
        model: a timm VisionTransformer of sequential or parallel blocks, or a VOLO.
        design: ``relu``, ``bn`` or ``no-norm``.

    Returns:
        The map from the model's keys to themselves, None for the tensors of a new BatchNorm. Removed norms are not
        in it.

    Raises:
        UsageError: another model, block or FFN, or one that was changed already; the model is unchanged.
    """
    if design not in get_args(Design):
        raise UsageError(f"`--mlp` is {design}; allowed is {', '.join(get_args(Design))}")
    places = [place for where, block in _blocks(model) for place in _places(where, block)]
    before = set(model.state_dict())
    for parent, norm, mlp in places:
        if design == "no-norm":
            setattr(parent, norm, nn.Identity())
            continue
        weight = mlp.fc1.weight
        mlp.act = (
            nn.ReLU() if design == "relu" else TokenBatchNormAct(len(weight), mlp.act, weight.device, weight.dtype)
        )
        mlp.act.train(mlp.training)
    return {key: key if key in before else None for key in model.state_dict()}


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    if isinstance(model, vit.VisionTransformer):
        return [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
    if isinstance(model, volo.VOLO):
        stages = [(i, stage) for i, stage in enumerate(model.network) if isinstance(stage, nn.Sequential)]
        return [(f"network.{i}.{j}", block) for i, stage in stages for j, block in enumerate(stage)]
    raise UsageError(f"`--mlp` changes timm's VisionTransformer ({EXAMPLES}) and VOLO, not {type(model).__name__}")


def _places(where: str, block: nn.Module) -> list[tuple[Any, str, Any]]:
    """Return, for each FFN of a block, its parent module, the name of its norm there, and the FFN."""
    if isinstance(block, vit.ParallelThingsBlock):
        found = [(branch, "norm", branch.mlp) for branch in block.ffns]
    elif type(block) in (vit.Block, volo.Outlooker, volo.Transformer):
        found = [(block, "norm2", block.mlp)]
    else:
        raise UsageError(
            f"`--mlp`: {where} is a {type(block).__name__}; supported are timm's Block, ParallelThingsBlock, VOLO's"
        )
    for parent, norm, mlp in found:
        if type(mlp) is not Mlp:
            raise UsageError(f"`--mlp`: the FFN of {where} is a {type(mlp).__name__}; only timm's Mlp can be changed")
        if isinstance(mlp.act, (TokenBatchNormAct, nn.ReLU)) or isinstance(getattr(parent, norm), nn.Identity):
            raise UsageError(f"`--mlp`: the FFN of {where} already has one of these designs; it is changed once")
    return found
