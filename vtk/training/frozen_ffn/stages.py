"""The two stages of a block while it trains with frozen norms and FFN: x + attention, and x + FFN.

Between them addition and norm are one pass over the tokens. Modules that draw random numbers are called in timm's
order: the same seed drops the same paths.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk.models.transforms.context_broadcast import ContextBroadcast, find_context_broadcast
from vtk.training.frozen_ffn import rules
from vtk.training.frozen_ffn._bodies import affine
from vtk.training.frozen_ffn.attention_operator import HeadNorm, kept_attention
from vtk.training.frozen_ffn.ffn import frozen_ffn
from vtk.training.frozen_ffn.fold import folded
from vtk.training.frozen_ffn.handover import close_block, open_block
from vtk.training.frozen_ffn.low_rank import factors_of, is_lora
from vtk.training.frozen_ffn.norm import add_normalise, affine_linear, normalise
from vtk.training.frozen_ffn.rules import BlockModes, Branch

Each = Callable[[nn.Module, Tensor], Tensor]
"""Applies a module that looks at an image as a whole, or draws a number for it, to the tokens of every image."""


def both_stages(block: Any, x: Tensor) -> Tensor:
    """Return what a block whose memory mode was chosen makes of tokens (B, N, C)."""
    same = x.dtype == _dtype(x)
    r = _attention(block, x, open_block(x))
    normed = {}
    if same and r.dtype == x.dtype:
        eps = rules.ffn_branches(block)[0].norm.eps
        x, normed[eps] = add_normalise(x, r, eps)
    else:
        x = x + r
    return close_block(block, x, _ffn(block, x, _whole, normed), same=same)


def attention_stage(block: Any, x: Tensor) -> Tensor:
    """Return x + attention of tokens (B, N, C), for a block whose memory mode was chosen."""
    return x + _attention(block, x, {})


def _attention(block: Any, x: Tensor, normed: dict[float, Tensor]) -> Tensor:
    modes: BlockModes = block.memory_modes

    def branch(found: Branch, x_hat: Tensor) -> Tensor:
        return _attend(found.module, found.norm, x_hat, modes.qkv_again)

    return _residual(block, rules.attention_branches(block), getattr(block, "cb_msa", None), x, branch, _whole, normed)


def ffn_stage(block: Any, x: Tensor, each: Each) -> Tensor:
    """Return x + FFN of tokens (B, N, C), for a block whose memory mode was chosen.

    Args:
        block: the block.
        x: the tokens, also (1, T, C) of many images.
        each: applies stochastic depth and Context Broadcasting to ``x`` image by image.
    """
    return x + _ffn(block, x, each, {})


def _ffn(block: Any, x: Tensor, each: Each, normed: dict[float, Tensor]) -> Tensor:
    modes: BlockModes = block.memory_modes

    def branch(found: Branch, x_hat: Tensor) -> Tensor:
        return _feed(found, x_hat, modes, each)

    return _residual(block, rules.ffn_branches(block), getattr(block, "cb", None), x, branch, each, normed)


def _whole(module: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = module(x)
    return y


def _dtype(x: Tensor) -> torch.dtype:
    """Return the type of the layers behind a norm of ``x``; autocast leaves fp64 alone."""
    cast = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    return torch.get_autocast_dtype(x.device.type) if cast else x.dtype


def _residual(
    block: Any, branches: Sequence[Branch], context: ContextBroadcast | None, x: Tensor,
    run: Callable[[Branch, Tensor], Tensor], each: Each, normed: dict[float, Tensor],
) -> Tensor:  # fmt: skip
    """Return what is added to ``x``; branches share what is ``normed``, by eps, so that it is kept once."""
    outs = []
    for branch in branches:
        eps = branch.norm.eps
        if eps not in normed:
            normed[eps] = normalise(x, eps, _dtype(x))
        y = branch.scale(run(branch, normed[eps]))
        outs.append(y if isinstance(branch.drop_path, nn.Identity) else each(branch.drop_path, y))
    total = torch.stack(outs).sum(dim=0) if hasattr(block, "attns") else outs[0]
    return total if context is None else each(context, total)


def _attend(attn: Any, norm: Any, x_hat: Tensor, qkv_again: bool) -> Tensor:
    context, placement = _context(attn)
    source, gamma, beta = _input(norm, x_hat, context if placement == "front" else None, _whole)
    linear = functools.partial(_linear_of, source, gamma, beta)
    gate = linear(attn.gate).sigmoid() if getattr(attn, "gate", None) is not None else None
    if qkv_again:
        q_norm, k_norm = _head_norm(attn.q_norm, source), _head_norm(attn.k_norm, source)
        o = kept_attention(source, gamma, beta, *_weights(attn.qkv, source), attn.num_heads, q_norm, k_norm)
    else:
        o = _plain_attention(attn, linear(attn.qkv))
    o = attn.norm(o) if hasattr(attn, "norm") else o
    y: Tensor = attn.proj_drop(attn.proj(o if gate is None else o * gate))
    return context(y) if context is not None and placement == "end" else y


def _plain_attention(attn: Any, qkv: Tensor) -> Tensor:
    """Continue as timm's attention does behind qkv (B, N, 3 H D); return (B, N, H D)."""
    q, k, v = qkv.unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = attn.q_norm(q), attn.k_norm(k)
    if attn.fused_attn:
        o = F.scaled_dot_product_attention(q, k, v, dropout_p=attn.attn_drop.p if attn.training else 0.0)
    else:
        o = attn.attn_drop(((q * attn.scale) @ k.transpose(-2, -1)).softmax(dim=-1)) @ v
    return o.transpose(1, 2).flatten(2)


def _feed(branch: Branch, x_hat: Tensor, modes: BlockModes, each: Each) -> Tensor:
    mlp, norm = branch.module, branch.norm
    context, placement = _context(mlp)
    fold = folded(norm, mlp.fc1, x_hat.dtype) if modes.folds and placement != "front" else None
    if modes.ffn == "plain" and fold is not None:
        hidden = F.gelu(F.linear(x_hat, *fold))
        hidden = hidden if context is None or placement != "mid" else each(context, hidden)
        y = F.linear(hidden, *_weights(mlp.fc2, x_hat))
        return each(context, y) if context is not None and placement == "end" else y
    if modes.ffn == "plain":
        h = affine(x_hat, norm.weight, norm.bias)
        return _whole(mlp, h) if context is None or each is _whole else _broadcast(mlp, h, context, placement, each)
    source, gamma, beta = _input(norm, x_hat, context if placement == "front" else None, each)
    if fold is not None:
        gamma = beta = None
    (w1, b1), (w2, b2) = fold or _weights(mlp.fc1, source), _weights(mlp.fc2, source)
    if placement == "mid":  # between GELU and fc2, which therefore is a layer of its own
        hidden = frozen_ffn(source, gamma, beta, w1, b1, None, None, modes.ffn == "gelu8")
        assert context is not None
        return F.linear(each(context, hidden), w2, b2)
    y = frozen_ffn(source, gamma, beta, w1, b1, w2, b2, modes.ffn == "gelu8")
    return each(context, y) if context is not None and placement == "end" else y


def _broadcast(mlp: Any, h: Tensor, context: ContextBroadcast, placement: str | None, each: Each) -> Tensor:
    """Run an FFN with Context Broadcasting, image by image; without it, the FFN is of its class's base."""
    if placement == "mid":
        hidden = mlp.norm(mlp.drop1(mlp.act(mlp.fc1(h))))
        y: Tensor = mlp.drop2(mlp.fc2(each(context, hidden)))
        return y
    plain: Any = type(mlp).__bases__[0]
    if placement == "front":
        return plain.forward(mlp, each(context, h))  # type: ignore[no-any-return]
    return each(context, plain.forward(mlp, h))


def _context(module: Any) -> tuple[ContextBroadcast | None, str | None]:
    return find_context_broadcast(module), getattr(module, "cb_placement", None)


def _input(
    norm: Any, x_hat: Tensor, context: ContextBroadcast | None, each: Each
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return what a module is given as (tokens, γ, β); with Context Broadcasting before it γ and β are applied."""
    if context is None:
        return x_hat, norm.weight, norm.bias
    return each(context, affine(x_hat, norm.weight, norm.bias)).to(x_hat.dtype), None, None


def _linear_of(source: Tensor, gamma: Tensor | None, beta: Tensor | None, layer: Any) -> Tensor:
    if is_lora(layer):
        parts = factors_of(layer)
        if parts is None:
            wrapped: Tensor = layer(affine(source, gamma, beta))
            return wrapped
        low = affine_linear(source, gamma, beta, *_weights(parts.a, source))
        update = F.linear(low, *_weights(parts.b, source)) * parts.scaling
        return affine_linear(source, gamma, beta, *_weights(parts.base, source)) + update
    return affine_linear(source, gamma, beta, *_weights(layer, source))


def _weights(layer: Any, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias in the type of the tokens: under autocast theirs is another."""
    return layer.weight.to(like.dtype), None if layer.bias is None else layer.bias.to(like.dtype)


def _head_norm(norm: Any, like: Tensor) -> HeadNorm | None:
    if not isinstance(norm, nn.LayerNorm):
        return None
    weight, bias = (None if p is None else p.to(like.dtype) for p in (norm.weight, norm.bias))
    return HeadNorm(weight, bias, norm.eps)
