"""Checks which parts of a block the memory modes may change, and gives the reason where they may not.

The parts that the engine computes itself must be frozen (the norm before attention, the norm before the FFN, the FFN),
free of hooks, and of known classes.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from timm.layers import LayerNorm, RmsNorm
from torch import nn

from vtk.models.transforms.context_broadcast import ContextBroadcast, find_context_broadcast, own_class
from vtk.training.finetune_config import MemoryMode
from vtk.training.frozen_ffn import parts
from vtk.training.frozen_ffn.low_rank import is_lora
from vtk.training.frozen_ffn.parts import Branch

FfnKept = Literal["plain", "bytes", "recompute"]

_IDENTITY = (nn.Identity, type(None))
_NORMS = (nn.LayerNorm, LayerNorm, RmsNorm, nn.RMSNorm)


@dataclass(frozen=True)
class BlockModes:
    """What a block does while it trains.

    Attributes:
        qkv_again: compute queries, keys and values a second time in backward.
        attends: whether the engine may compute attention itself.
        ffn: what its FFNs keep.
        folds: whether the frozen norms may be folded into its FFNs.
    """

    qkv_again: bool
    attends: bool
    ffn: FfnKept
    folds: bool


def choose(block: nn.Module, mode: MemoryMode) -> tuple[BlockModes | None, list[str]]:
    """Return what a block of a known class can do of ``mode``, None for nothing, and why not all of it."""
    attns, ffns = parts.attention_branches(block), parts.ffn_branches(block)
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
        ffn = "bytes" if mode == "act8" else "recompute"
        if ffn == "bytes" and (why := next(_first(map(_no_bytes, ffns)), None)):
            ffn = "plain"
            notes.append(why)
    why = next(_first(map(_plain_attention, attns)), None)
    attends = why is None
    if mode == "minimal" and why is not None:
        notes.append(why)
    again = mode == "minimal" and attends
    why = next(_first(map(_low_rank, attns)), None) if again else None
    if why is not None:
        notes.append(why)
    return BlockModes(again and why is None, attends, ffn, folds), notes


def still_frozen(branch: Branch, ffn: bool) -> bool:
    """Tell whether what the engine gives no gradient to still needs none: `requires_grad` may change later."""
    parameters = list(branch.norm.parameters())
    if ffn:
        own = find_context_broadcast(branch.module)
        context = set() if own is None else {id(p) for p in own.parameters()}
        parameters += [p for p in branch.module.parameters() if id(p) not in context]
    return not any(p.requires_grad for p in parameters)


_NUMBERS = ("p", "scale", "eps", "fused_attn", "rotate_half", "gate_last", "qkv_bias_separate")


def fingerprint(block: nn.Module) -> tuple[tuple[Any, ...], ...]:
    """Return what `choose` looked at in a block, so that `is_as_chosen` can tell whether it has changed since.

    An adapter put in place of a layer, a hook, or dropout that is switched on would otherwise go unseen.
    """
    return tuple(
        (m, type(m).__qualname__, _watched(m), *(_number(m, name) for name in _NUMBERS))
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
    if not _known_norm(norm):
        return f"norms are {type(norm).__name__}"
    if _trained(norm):
        return "norms are trained"
    return "norms have hooks" if _watched(norm) else None


def _known_norm(norm: Any) -> bool:
    return type(norm) in _NORMS and len(norm.normalized_shape) == 1 and norm.eps is not None


def _refuse_attention(branch: Branch) -> str | None:
    attn = branch.module
    if own_class(attn) not in parts.ATTENTIONS:
        return f"attention is {type(attn).__name__}"
    layers = parts.projections(attn)
    for layer in layers:
        if type(layer) is not nn.Linear and not is_lora(layer):
            return f"qkv is {type(layer).__name__}"
    if getattr(attn, "q_bias", None) is not None and is_lora(layers[0]) and not attn.qkv_bias_separate:
        return "attention with q_bias does not call qkv, and so none of its LoRA factors"
    if type(getattr(attn, "gate", None)) not in (nn.Linear, type(None)):
        return f"attention's gate is {type(attn.gate).__name__}"
    return "attention has hooks" if _watched(attn, *layers) else None


def _refuse_ffn(branch: Branch) -> str | None:
    own: ContextBroadcast | None = find_context_broadcast(branch.module)
    context = set() if own is None else {id(p) for p in own.parameters()}
    if any(p.requires_grad and id(p) not in context for p in branch.module.parameters()):
        return "FFNs are trained"
    return None


def _plain_ffn(branch: Branch) -> str | None:
    mlp = branch.module
    layers = parts.ffn_layers(mlp)
    if layers is None or any(type(layer) is not nn.Linear for layer in (*layers.first, layers.second)):
        return f"FFNs are {type(mlp).__name__}"
    if layers.activation is None:
        return f"activations are {type(mlp.act).__name__}, not GELU or SiLU"
    if layers.norm is not None and not _known_norm(layers.norm):
        return f"norms inside FFNs are {type(layers.norm).__name__}"
    if any(drop.p > 0 for drop in (mlp.drop1, mlp.drop2)):
        return "FFNs have dropout"
    inner = () if layers.norm is None else (layers.norm,)
    return "FFNs have hooks" if _watched(mlp, *layers.first, layers.second, mlp.act, *inner) else None


def _no_bytes(branch: Branch) -> str | None:
    layers = parts.ffn_layers(branch.module)
    if layers is not None and layers.gated and layers.activation != "silu":
        return f"gates are {type(branch.module.act).__name__}, and 8 bits are for SiLU's"
    return None


def _plain_attention(branch: Branch) -> str | None:
    attn = branch.module
    norms = [norm for name in ("q_norm", "k_norm") if not isinstance(norm := getattr(attn, name, None), _IDENTITY)]
    for norm in norms:
        if not _known_norm(norm):
            return f"norms of queries and keys are {type(norm).__name__}"
        if _watched(norm):
            return "norms of queries and keys have hooks"
    if len({type(norm) in (RmsNorm, nn.RMSNorm) for norm in norms}) > 1:
        return "norms of queries and keys are of two kinds"
    channels = parts.head_channels(attn)
    if not attn.fused_attn and not math.isclose(attn.scale, channels**-0.5):
        return f"attention is scaled by {attn.scale:.4g}, not by 1/√D"
    return "attention has dropout" if attn.attn_drop.p > 0 else None


def _low_rank(branch: Branch) -> str | None:
    if any(is_lora(layer) for layer in parts.projections(branch.module)):
        return "qkv has LoRA factors, and its result is kept"
    return None
