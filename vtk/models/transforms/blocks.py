"""Finds the blocks of a model, and their attention and FFN modules, for transforms."""

from collections.abc import Sequence
from typing import Any, Literal

import timm.models.vision_transformer as vit
from timm.models.mlp_mixer import MixerBlock, MlpMixer
from timm.models.pit import PoolingVisionTransformer
from torch import nn

from vtk.errors import UsageError

Where = Literal["mlp", "msa"]

EXAMPLES = "such as vit_small_patch16_224, deit3_small_patch16_224 and vit_small_patch14_dinov2"
"""Models of timm's VisionTransformer: names that begin with vit_ are also those of its Eva."""
_KNOWN = f"timm's VisionTransformer ({EXAMPLES}), PiT and MLP-Mixer"


def find_blocks(model: nn.Module, what: str) -> list[tuple[str, nn.Module]]:
    """Return the blocks of a model with their names; a PiT's blocks are numbered across its stages.

    Args:
        model: a timm model.
        what: the change, for the message.

    Raises:
        UsageError: a model of another kind.
    """
    if isinstance(model, PoolingVisionTransformer):
        groups: list[tuple[str, Any]] = [
            (f"transformers.{i}.blocks", stage.blocks) for i, stage in enumerate(model.transformers)
        ]
    elif isinstance(model, (vit.VisionTransformer, MlpMixer)):
        groups = [("blocks", model.blocks)]
    else:
        raise UsageError(f"{type(model).__name__} cannot have {what}; supported are {_KNOWN}")
    return [(f"{prefix}.{i}", block) for prefix, blocks in groups for i, block in enumerate(blocks)]


def choose_layers(layers: str | Sequence[int], depth: int) -> list[int]:
    """Return the block numbers of ``all``, ``upper`` (i ≥ depth // 2) or a list of numbers.

    Raises:
        UsageError: another value, or a block that is absent or repeated.
    """
    if layers == "all":
        return list(range(depth))
    if layers == "upper":
        return list(range(depth // 2, depth))
    if isinstance(layers, str) or not isinstance(layers, (list, tuple)) or not layers:
        raise UsageError(f"`layers` is {layers!r}; give all, upper, or block numbers from 0 to {depth - 1}")
    for i in layers:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < depth:
            raise UsageError(f"`layers` has {i!r}; the model's blocks are 0 to {depth - 1}")
    if len(set(layers)) < len(layers):
        raise UsageError(f"`layers` {list(layers)} has a block twice; give each once")
    return sorted(layers)


def branch_modules(name: str, block: nn.Module, where: Where, what: str) -> list[tuple[str, Any]]:
    """Return the FFN or attention modules of a block with their names, one per parallel branch.

    Args:
        name: of the block.
        block: of `find_blocks`.
        where: ``mlp`` or ``msa``.
        what: the change, for the message.

    Raises:
        UsageError: the block has none, or is of an unsupported kind.
    """
    leaf = "mlp" if where == "mlp" else "attn"
    if type(block) is vit.ParallelThingsBlock:
        stage = "ffns" if where == "mlp" else "attns"
        branches = enumerate(getattr(block, stage))
        return [(f"{name}.{stage}.{i}.{leaf}", getattr(b, leaf)) for i, b in branches]
    if isinstance(block, (vit.Block, vit.ResPostBlock)):
        return [(f"{name}.{leaf}", getattr(block, leaf))]
    if isinstance(block, MixerBlock):
        if where == "msa":
            raise UsageError(f"{name} is a MixerBlock, which has no attention; only its FFN can have {what}")
        return [(f"{name}.mlp_channels", block.mlp_channels)]
    raise UsageError(f"{name} is a {type(block).__name__}, which cannot have {what}; supported are {_KNOWN}")
