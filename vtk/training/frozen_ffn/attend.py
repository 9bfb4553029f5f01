"""The attention of a block while it trains with a frozen norm, from normalised tokens to what is added to them.

All classes of attention are one here: projections, norms of heads, rotary embedding, relative positions, shared heads
of keys, a norm and a gate behind. What the engine does not compute itself runs as timm's modules do.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import RmsNorm, apply_rot_embed_cat
from torch import Tensor, nn

from vtk.training.frozen_ffn import parts
from vtk.training.frozen_ffn._bodies import affine
from vtk.training.frozen_ffn.attention_operator import attention_of, kept_attention
from vtk.training.frozen_ffn.context import context_of, each_input, whole
from vtk.training.frozen_ffn.heads import NO_NORM, HeadNorm, Heads
from vtk.training.frozen_ffn.linear import affine_linear
from vtk.training.frozen_ffn.low_rank import factors_of, is_lora
from vtk.training.frozen_ffn.parts import Branch, Positions
from vtk.training.frozen_ffn.rules import BlockModes


def attend(branch: Branch, x_hat: Tensor, modes: BlockModes, positions: Positions) -> Tensor:
    """Return attention of normalised tokens (B, N, C)."""
    attn = branch.module
    context, placement = context_of(attn)
    source, gamma, beta = each_input(branch.norm, x_hat, context if placement == "front" else None, whole)
    linear = functools.partial(_linear_of, source, gamma, beta)
    gate = linear(attn.gate).sigmoid() if getattr(attn, "gate", None) is not None else None
    bias = parts.score_bias(attn, positions.shared)
    if bias is not None:
        bias = bias.reshape(bias.shape[-3:]).to(source.dtype)
    heads = _heads(attn, source, positions)
    if modes.qkv_again:
        o = kept_attention(source, gamma, beta, *_projections(attn, source), heads, bias)
    else:
        qkv = _project(attn, source, gamma, beta)
        if modes.attends and _pays(heads, bias):
            o = attention_of(qkv, heads, bias)
        else:
            o = _by_torch(attn, qkv, positions, bias)
    o = attn.norm(o) if hasattr(attn, "norm") else o
    y: Tensor = attn.proj_drop(attn.proj(o if gate is None else o * gate))
    return context(y) if context is not None and placement == "end" else y


def _pays(heads: Heads, bias: Tensor | None) -> bool:
    """Tell whether torch's autograd would keep more than the projections and the output."""
    if bias is not None and bias.is_cuda:
        return False  # torch's kernel there knows the gradient of a bias
    norms = heads.q_norm.eps >= 0 or heads.k_norm.eps >= 0
    return norms or heads.rope is not None or bias is not None or heads.keys < heads.queries


def _heads(attn: Any, like: Tensor, positions: Positions) -> Heads:
    q_norm, k_norm = (_head_norm(getattr(attn, name, None), like) for name in ("q_norm", "k_norm"))
    half = bool(getattr(attn, "rotate_half", False))
    return Heads(attn.num_heads, parts.kv_heads(attn), q_norm, k_norm, positions.rope, half)


def _head_norm(norm: Any, like: Tensor) -> HeadNorm:
    if not isinstance(norm, (nn.LayerNorm, nn.RMSNorm, RmsNorm)):
        return NO_NORM
    weight, bias = (None if p is None else p.to(like.dtype) for p in parts.affine_of(norm))
    return HeadNorm(weight, bias, *parts.norm_form(norm))


def _project(attn: Any, source: Tensor, gamma: Tensor | None, beta: Tensor | None) -> list[Tensor]:
    """Return what attention's projections make of the tokens: of one layer, or of three."""
    layers = parts.projections(attn)
    if not any(is_lora(layer) for layer in layers):
        w, b = _projections(attn, source)
        return affine_linear(source, gamma, beta, w, b)
    found = [_linear_of(source, gamma, beta, layer) for layer in layers]
    own = parts.projection_bias(attn) if getattr(attn, "q_bias", None) is not None else None
    if own is not None:  # beside a layer that has none
        found[0] = found[0] + own.to(source.dtype)
    return found


def _projections(attn: Any, like: Tensor) -> tuple[list[Tensor], Tensor | None]:
    bias = parts.projection_bias(attn)
    weights = [layer.weight.to(like.dtype) for layer in parts.projections(attn)]
    return weights, None if bias is None else bias.to(like.dtype)


def _linear_of(source: Tensor, gamma: Tensor | None, beta: Tensor | None, layer: Any) -> Tensor:
    if is_lora(layer):
        factors = factors_of(layer)
        if factors is None:
            wrapped: Tensor = layer(affine(source, gamma, beta))
            return wrapped
        low = _plain_linear(source, gamma, beta, factors.a)
        update = F.linear(low, factors.b.weight.to(source.dtype)) * factors.scaling
        return _plain_linear(source, gamma, beta, factors.base) + update
    return _plain_linear(source, gamma, beta, layer)


def _plain_linear(source: Tensor, gamma: Tensor | None, beta: Tensor | None, layer: Any) -> Tensor:
    bias = None if layer.bias is None else layer.bias.to(source.dtype)
    return affine_linear(source, gamma, beta, [layer.weight.to(source.dtype)], bias)[0]


def _by_torch(attn: Any, qkv: list[Tensor], positions: Positions, bias: Tensor | None) -> Tensor:
    """Continue as timm's attention does behind its projections; return (B, N, H D)."""
    sizes = attn.num_heads, parts.kv_heads(attn)
    if len(qkv) == 1:
        joined = qkv[0].unflatten(-1, (sizes[0] + 2 * sizes[1], -1)).transpose(1, 2)
        q, k, v = joined.split((sizes[0], sizes[1], sizes[1]), dim=1)
    else:
        q, k, v = (x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in zip(qkv, (*sizes, sizes[1]), strict=True))
    if hasattr(attn, "q_norm"):
        q, k = attn.q_norm(q), attn.k_norm(k)
    if positions.rope is not None:
        q, k = (_rotated(x, positions.rope, bool(attn.rotate_half)).type_as(v) for x in (q, k))
    groups = sizes[0] // sizes[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    if attn.fused_attn:
        dropped = attn.attn_drop.p if attn.training else 0.0
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropped)
    else:
        scores = (q * attn.scale) @ k.transpose(-2, -1)
        o = attn.attn_drop((scores if bias is None else scores + bias).softmax(dim=-1)) @ v
    return o.transpose(1, 2).flatten(2)


def _rotated(x: Tensor, rope: Tensor, half: bool) -> Tensor:
    first = x.shape[2] - rope.shape[-2]
    return torch.cat([x[:, :, :first], apply_rot_embed_cat(x[:, :, first:], rope, half=half)], dim=2)
