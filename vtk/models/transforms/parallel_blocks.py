"""The transform ``parallelize``: makes consecutive blocks of a sequential ViT parallel (Touvron et al. 2022, eq. 1–2).

x + mhsaₗ(x), then ffnₗ, then mhsaₗ₊₁, then ffnₗ₊₁, becomes x + mhsaₗ(x) + mhsaₗ₊₁(x), then + ffnₗ + ffnₗ₊₁ of that. The
weights are unchanged, so the functions differ; they are the closer, the less each block changes its input.
"""

import re
from collections import OrderedDict
from typing import Any

from timm.models.vision_transformer import Block, ParallelThingsBlock, VisionTransformer
from torch import nn

from vtk.errors import UsageError
from vtk.models.transforms.blocks import EXAMPLES
from vtk.models.transforms.context_broadcast import find_context_broadcast
from vtk.models.transforms.registry import register

_NAMES = {
    "norm1": "attns.{}.norm", "attn": "attns.{}.attn", "ls1": "attns.{}.ls",
    "norm2": "ffns.{}.norm", "mlp": "ffns.{}.mlp", "ls2": "ffns.{}.ls",
}  # fmt: skip
_KEY = re.compile(r"blocks\.(\d+)\.(\w+)\.(.+)")


@register("parallelize")
def parallelize(model: nn.Module, *, branches: int) -> dict[str, str | None]:
    """Join every ``branches`` consecutive blocks into one of timm's parallel blocks, in place.

    Args:
        model: a timm VisionTransformer of sequential blocks, also with LayerScale and qk-norm.
        branches: P; the depth must be a multiple of it.

    Returns:
        The map from the new keys (``blocks.0.attns.1.attn.qkv.weight``) to the old (``blocks.1.attn.qkv.weight``).

    Raises:
        UsageError: another kind of model or block, or a number of branches that does not divide the depth; the model is
            unchanged.
    """
    kind = type(model).__name__
    if not isinstance(model, VisionTransformer):
        raise UsageError(
            f"{kind} cannot be parallelized: timm has parallel blocks for its VisionTransformer only, which has no "
            f"rotary or relative positions; use a model {EXAMPLES}"
        )
    for i, block in enumerate(model.blocks):
        if type(block) is not Block:
            what = "is already parallel" if isinstance(block, ParallelThingsBlock) else f"is a {type(block).__name__}"
            raise UsageError(f"blocks.{i} of {kind} {what}; only timm's sequential Block can be parallelized")
        if find_context_broadcast(block.mlp) or find_context_broadcast(block.attn):
            raise UsageError(f"blocks.{i} has Context Broadcasting; parallelize first and add it afterwards")
    depth = len(model.blocks)
    valid = [p for p in range(2, depth + 1) if depth % p == 0]
    if isinstance(branches, bool) or not isinstance(branches, int) or branches not in valid:
        choice = ", ".join(map(str, valid)) or "none: there is only one block"
        raise UsageError(f"`branches` is {branches!r}; a depth of {depth} can be divided by {choice}")
    names = {parallel_key(key, branches): key for key in model.state_dict()}
    groups = [list(model.blocks[i : i + branches]) for i in range(0, depth, branches)]
    kept = {id(module) for module in model.modules()}
    model.blocks = nn.Sequential(*map(_join, groups))
    for module in model.blocks.modules():
        if id(module) not in kept:
            module.training = model.training
    model.feature_info = model.feature_info[: len(groups)]
    return {key: names[key] for key in model.state_dict()}


def parallel_key(key: str, branches: int) -> str:
    """Return the name of a sequential model's tensor in the parallel model."""
    match = _KEY.fullmatch(key)
    if match is None or match[2] not in _NAMES:
        return key
    block, branch = divmod(int(match[1]), branches)
    return f"blocks.{block}.{_NAMES[match[2]].format(branch)}.{match[3]}"


def _join(blocks: list[Any]) -> ParallelThingsBlock:
    """Return a parallel block with the modules of sequential ones."""
    parallel = ParallelThingsBlock(dim=1, num_heads=1, num_parallel=0)
    parallel.num_parallel = len(blocks)
    for block in blocks:
        attn = [("norm", block.norm1), ("attn", block.attn), ("ls", block.ls1), ("drop_path", block.drop_path1)]
        ffn = [("norm", block.norm2), ("mlp", block.mlp), ("ls", block.ls2), ("drop_path", block.drop_path2)]
        parallel.attns.append(nn.Sequential(OrderedDict(attn)))
        parallel.ffns.append(nn.Sequential(OrderedDict(ffn)))
    return parallel
