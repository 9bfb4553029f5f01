"""Checks which parts of a block the memory modes may change, and gives the reason where they may not.

A block is known by its class, exactly: a subclass may compute something else. The parts that the engine computes itself
must be frozen (the norm before attention, the norm before the FFN, the FFN), free of hooks, and of known classes.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from timm.layers import Attention, LayerNorm, Mlp
from timm.layers.activations import GELU
from timm.models.vision_transformer import Block, ParallelThingsBlock
from torch import nn

from vtk.models.transforms.context_broadcast import (
    ContextBroadcast,
    ContextParallelBlock,
    find_context_broadcast,
    own_class,
)
from vtk.training.finetune_config import MemoryMode
from vtk.training.frozen_ffn.low_rank import is_lora

FfnKept = Literal["plain", "gelu8", "recompute"]


@dataclass(frozen=True)
class Branch:
    """One residual branch: norm, attention or FFN, LayerScale, stochastic depth.

    Attributes:
        norm: LayerNorm before the module.
        module: attention or FFN.
        scale: LayerScale, or Identity.
        drop_path: DropPath, or Identity.
    """

    norm: Any
    module: Any
    scale: nn.Module
    drop_path: nn.Module


@dataclass(frozen=True)
class BlockModes:
    """What a block does while it trains.

    Attributes:
        qkv_again: compute queries, keys and values a second time in backward.
        ffn: what its FFNs keep.
        folds: whether the frozen norms may be folded into its FFNs.
    """

    qkv_again: bool
    ffn: FfnKept
    folds: bool


def attention_branches(block: Any) -> list[Branch]:
    """Return the attention branches of a known block; a sequential block has one."""
    if isinstance(block, ParallelThingsBlock):
        return [Branch(b.norm, b.attn, b.ls, b.drop_path) for b in block.attns]
    return [Branch(block.norm1, block.attn, block.ls1, block.drop_path1)]


def ffn_branches(block: Any) -> list[Branch]:
    """Return the FFN branches of a known block."""
    if isinstance(block, ParallelThingsBlock):
        return [Branch(b.norm, b.mlp, b.ls, b.drop_path) for b in block.ffns]
    return [Branch(block.norm2, block.mlp, block.ls2, block.drop_path2)]


def is_block(module: nn.Module) -> bool:
    """Tell whether ``module`` is of a class that the engine knows."""
    return type(module) in (Block, ParallelThingsBlock, ContextParallelBlock)


def choose(block: nn.Module, mode: MemoryMode) -> tuple[BlockModes | None, list[str]]:
    """Return what a block of a known class can do of ``mode``, None for nothing, and why not all of it."""
    attns, ffns = attention_branches(block), ffn_branches(block)
    reason = next(_first([*(_refuse_norm(b) for b in attns + ffns), *map(_refuse_attention, attns)]), None)
    reason = reason or next(_first(map(_refuse_ffn, ffns)), None)
    if reason is None:
        # an FFN that stays as it is is called as a module; of attention's parts not all are
        fed = {m for b in ffns for m in b.module.modules()}
        if _watched(*(m for m in block.modules() if m is not block and m not in fed)):
            reason = "blocks have hooks inside"
    if reason is not None:
        return None, [reason]
    notes = []
    ffn: FfnKept = "plain"
    why = next(_first(map(_plain_ffn, ffns)), None)
    folds = why is None
    if why is not None and mode != "plain":
        notes.append(why)
    elif mode != "plain":
        ffn = "gelu8" if mode == "gelu8" else "recompute"
    qkv_again = mode == "minimal"
    if qkv_again and (why := next(_first(map(_plain_attention, attns)), None)):
        qkv_again = False
        notes.append(why)
    return BlockModes(qkv_again, ffn, folds), notes


def still_frozen(branch: Branch, ffn: bool) -> bool:
    """Tell whether what the engine gives no gradient to still needs none: `requires_grad` may change later."""
    parameters = [branch.norm.weight, branch.norm.bias]
    if ffn:
        mlp = branch.module
        parameters += [mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias]
    return not any(p is not None and p.requires_grad for p in parameters)


def fingerprint(block: nn.Module) -> tuple[tuple[Any, ...], ...]:
    """Return what `choose` looked at in a block, so that `is_as_chosen` can tell whether it has changed since.

    An adapter put in place of a layer, a hook, or dropout that is switched on would otherwise go unseen.
    """
    return tuple(
        (m, type(m).__qualname__, _watched(m), *(_number(m, name) for name in ("p", "scale", "fused_attn")))
        for m in block.modules()
        if m is not block
    )


def is_as_chosen(block: nn.Module, before: tuple[tuple[Any, ...], ...]) -> bool:
    """Tell whether a block still has the parts of an earlier `fingerprint`."""
    now = fingerprint(block)
    return len(now) == len(before) and all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(now, before, strict=True))


def _number(module: nn.Module, name: str) -> float | None:
    value = module.__dict__.get(name)
    return float(value) if isinstance(value, (bool, int, float)) else None


def _first(reasons: Iterable[str | None]) -> Iterator[str]:
    return (r for r in reasons if r is not None)


def _trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _watched(*modules: nn.Module) -> bool:
    """Tell whether somebody looks into the modules, or has put something else in place of their forward pass."""
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        or "forward" in m.__dict__ or "parametrizations" in m._modules
        for m in modules
    )  # fmt: skip


def _refuse_norm(branch: Branch) -> str | None:
    norm = branch.norm
    if type(norm) not in (nn.LayerNorm, LayerNorm) or len(norm.normalized_shape) != 1:
        return f"norms are {type(norm).__name__}"
    if _trained(norm):
        return "norms are trained"
    return "norms have hooks" if _watched(norm) else None


def _refuse_attention(branch: Branch) -> str | None:
    attn = branch.module
    if own_class(attn) is not Attention:
        return f"attention is {type(attn).__name__}"
    if type(attn.qkv) is not nn.Linear and not is_lora(attn.qkv):
        return f"qkv is {type(attn.qkv).__name__}"
    if type(getattr(attn, "gate", None)) not in (nn.Linear, type(None)):
        return f"attention's gate is {type(attn.gate).__name__}"
    return "attention has hooks" if _watched(attn, attn.qkv) else None


def _refuse_ffn(branch: Branch) -> str | None:
    own: ContextBroadcast | None = find_context_broadcast(branch.module)
    context = set() if own is None else {id(p) for p in own.parameters()}
    if any(p.requires_grad and id(p) not in context for p in branch.module.parameters()):
        return "FFNs are trained"
    return None


def _plain_ffn(branch: Branch) -> str | None:
    mlp = branch.module
    if own_class(mlp) is not Mlp or type(mlp.fc1) is not nn.Linear or type(mlp.fc2) is not nn.Linear:
        return f"FFNs are {type(mlp).__name__}"
    if not (type(mlp.act) is nn.GELU and mlp.act.approximate == "none") and type(mlp.act) is not GELU:
        return f"activations are {type(mlp.act).__name__}, not the exact GELU"
    if type(getattr(mlp, "norm", None)) not in (nn.Identity, type(None)):
        return "FFNs have an inner norm"
    if any(drop.p > 0 for drop in (mlp.drop1, mlp.drop2)):
        return "FFNs have dropout"
    return "FFNs have hooks" if _watched(mlp, mlp.fc1, mlp.fc2, mlp.act) else None


def _plain_attention(branch: Branch) -> str | None:
    attn = branch.module
    if is_lora(attn.qkv):
        return "qkv has LoRA factors, and its result is kept"
    for norm in (attn.q_norm, attn.k_norm):
        if type(norm) not in (nn.Identity, nn.LayerNorm, LayerNorm):
            return f"norms of queries and keys are {type(norm).__name__}"
        if _watched(norm):
            return "norms of queries and keys have hooks"
    if not attn.fused_attn and not math.isclose(attn.scale, attn.head_dim**-0.5):
        return f"attention is scaled by {attn.scale:.4g}, not by 1/√D"
    return "attention has dropout" if attn.attn_drop.p > 0 else None
