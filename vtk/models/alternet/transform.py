"""The transform ``build_up``: turns a pre-activation ResNet of timm into an AlterNet (Park and Kim 2022)."""

from collections.abc import Sequence
from typing import Any

from timm.layers import BatchNormAct2d, GroupNormAct
from timm.models.resnetv2 import PreActBasic, PreActBottleneck, ResNetV2
from torch import nn

from vtk.errors import UsageError
from vtk.models.alternet.rule import per_stage, placement
from vtk.models.alternet.window_attention import AttentionBlock, WindowAttention
from vtk.models.transforms.registry import register

HEADS = (3, 6, 12, 24)
"""Heads of attention blocks by stage (Park and Kim 2022, appendix E)."""
HEAD_DIM = 64
"""Channels per head in the reference code, in every stage and model."""

_KNOWN = "timm's pre-activation ResNets (resnetv2_18, resnetv2_50, …) and preact_resnet_*"


@register("build_up")
def build_up(
    model: nn.Module,
    *,
    msa_blocks: int | Sequence[int],
    window_size: int = 7,
    heads: Sequence[int] = HEADS,
    head_dim: int = HEAD_DIM,
) -> dict[str, str | None]:
    """Replace convolution blocks of a pre-activation ResNet by attention blocks, alternately from the end, in place.

    The norm before a replaced block keeps its values. Other tensors of an attention block are initialised at random.

    Args:
        model: timm's `ResNetV2` with pre-activation blocks, with BatchNorm or GroupNorm.
        msa_blocks: attention blocks of each stage, or of the model (`vtk.models.alternet.rule.per_stage`).
        window_size: side of a window in positions; 7 for ImageNet and 4 for CIFAR in the paper.
        heads: of attention blocks in each stage.
        head_dim: channels of a head.

    Returns:
        The map from the model's keys to themselves, None for the tensors of attention blocks.

    Raises:
        UsageError: another model, or numbers that do not fit it; the model is unchanged.
    """
    stages = _stages(model)
    counts = per_stage([len(blocks) for blocks in stages], msa_blocks)
    for name, value in (("window_size", window_size), ("head_dim", head_dim)):
        if type(value) is not int or value < 1:
            raise UsageError(f"`{name}` is {value!r}; allowed is at least 1")
    if not isinstance(heads, (list, tuple)) or len(heads) != len(stages) or any(type(h) is not int for h in heads):
        raise UsageError(f"`heads` is {heads!r}; give one number for each of the {len(stages)} stages")
    if min(heads) < 1:
        raise UsageError(f"`heads` is {list(heads)}; every number must be at least 1")
    # all new blocks are built before any is replaced
    new = {
        (s, i): _attention_block(blocks[i], f"stages.{s}.blocks.{i}", heads[s], head_dim, window_size)
        for s, (blocks, count) in enumerate(zip(stages, counts, strict=True))
        for i, chosen in enumerate(placement(len(blocks), count))
        if chosen
    }
    for (s, i), block in new.items():
        stages[s][i] = block
    new_prefixes = tuple(f"stages.{s}.blocks.{i}.attn." for s, i in new)
    return {key: None if key.startswith(new_prefixes) else key for key in model.state_dict()}


def _stages(model: nn.Module) -> list[Any]:
    """Return the blocks of every stage."""
    if not isinstance(model, ResNetV2):
        raise UsageError(f"{type(model).__name__} cannot be built up; supported are {_KNOWN}")
    stages = [stage.blocks for stage in model.stages]
    for s, blocks in enumerate(stages):
        for i, block in enumerate(blocks):
            if isinstance(block, AttentionBlock):
                raise UsageError(
                    f"stages.{s}.blocks.{i} is already an attention block; start from a model without attention blocks"
                )
            if type(block) not in (PreActBasic, PreActBottleneck):
                raise UsageError(f"stages.{s}.blocks.{i} is a {type(block).__name__}; supported are {_KNOWN}")
    return stages


def _attention_block(block: Any, where: str, heads: int, head_dim: int, window: int) -> AttentionBlock:
    """Return the attention block that replaces a convolution block."""
    if block.downsample is not None:
        raise UsageError(f"{where} changes the size or channels of the map and cannot be an attention block")
    old: Any = block.norm1
    if type(old) not in (BatchNormAct2d, GroupNormAct):
        raise UsageError(f"{where}.norm1 is a {type(old).__name__}; supported are BatchNormAct2d and GroupNormAct")
    like = next(block.parameters())
    groups = old.num_groups if isinstance(old, GroupNormAct) else 1
    dim: int = old.num_channels if isinstance(old, GroupNormAct) else old.num_features
    reduced = dim // 4 if type(block) is PreActBottleneck else dim
    if reduced < 1 or reduced % groups:
        raise UsageError(f"{where} has {dim} channels; a quarter of them is not divisible by {groups} groups")

    def norm(channels: int, **kwargs: Any) -> nn.Module:
        module: nn.Module = (
            GroupNormAct(channels, groups, eps=old.eps, **kwargs)
            if isinstance(old, GroupNormAct)
            else BatchNormAct2d(channels, eps=old.eps, momentum=old.momentum, **kwargs)
        )
        return module

    first, inner = norm(dim, act_layer=nn.GELU), norm(reduced, apply_act=False)
    new = AttentionBlock(first, WindowAttention(dim, inner, reduced, heads, head_dim, window), block.drop_path)
    new.to(device=like.device, dtype=like.dtype).train(block.training)
    first.load_state_dict(old.state_dict(), assign=like.is_meta)
    return new
