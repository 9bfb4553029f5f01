"""Attention, from normalised tokens or from its projections to its output, that keeps as little as it can for backward.

    qkv = (x_hat ⊙ γ + β) · wᵀ + b,    q, k, v = heads(qkv),    o = softmax(q kᵀ / √D + bias) v

Kept by `kept_attention`: x_hat (which the norm keeps anyway), o (which the projection behind keeps anyway) and
logsumexp. By `attention_of`: the projections as they are, o and logsumexp; not what norms of heads, rotation and shared
heads make of them, nor scores. The backward computes those again, not the attention.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vtk.training.frozen_ffn._bodies import affine, body
from vtk.training.frozen_ffn.flash import attention, attention_backward
from vtk.training.frozen_ffn.heads import HeadNorm, Heads, prepare, prepare_backward
from vtk.training.frozen_ffn.linear import linear_gradients, linears

_SMALL = 6
"""Tensors of `Heads` and the bias, as operators take them: rope, bias, weight and bias of both norms."""


def _heads(small: Sequence[Tensor | None], sizes: Sequence[int], eps: Sequence[float]) -> Heads:
    """Return what operators are given in pieces, since they take neither tuples nor classes."""
    rope, _, q_weight, q_bias, k_weight, k_bias = small
    queries, keys, half, rms = sizes
    norms = HeadNorm(q_weight, q_bias, eps[0], bool(rms)), HeadNorm(k_weight, k_bias, eps[1], bool(rms))
    return Heads(queries, keys, *norms, rope, bool(half))


def _attend(qkv: Sequence[Tensor], heads: Heads, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    o, lse = attention(*prepare(qkv, heads), bias=bias)
    return o.flatten(2), lse


def _attend_backward(
    g: Tensor, o: Tensor, lse: Tensor, qkv: Sequence[Tensor], heads: Heads, bias: Tensor | None, needs: Sequence[bool]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of the projections, and those of `_SMALL` tensors, empty where none is needed."""
    shape = (heads.queries, g.shape[-1] // heads.queries)
    g_bias = torch.zeros_like(bias, dtype=lse.dtype) if bias is not None and needs[1] else None
    found = attention_backward(
        g.unflatten(-1, shape), *prepare(qkv, heads), o.unflatten(-1, shape), lse, bias=bias, bias_grad=g_bias
    )
    back = prepare_backward(*found, qkv, heads, needs[0])
    # as qkv lies in memory
    whole = torch.cat([back.q, back.k, back.v], dim=2).flatten(2) if len(qkv) == 1 else None
    grads = [whole] if whole is not None else [one.flatten(2).contiguous() for one in (back.q, back.k, back.v)]
    if g_bias is not None and bias is not None:
        g_bias = g_bias.to(bias.dtype)
    small = (back.rope, g_bias, back.q_weight, back.q_bias, back.k_weight, back.k_bias)
    none = g.new_empty(0)
    kept = [one if need and one is not None else none.clone() for one, need in zip(small, needs, strict=True)]
    return grads, kept


def _fake_small(g: Tensor, small: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor]:
    return [
        one.new_empty(one.shape) if need and one is not None else g.new_empty(0)
        for one, need in zip(small, needs, strict=True)
    ]


def _lse_like(x: Tensor, heads: int) -> Tensor:
    return x.new_empty((x.shape[0], heads, x.shape[1]), dtype=torch.promote_types(x.dtype, torch.float32))


@torch.library.custom_op("vtk_training::kept_attention", mutates_args=())
@body
def _kept_attention(
    x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w: Sequence[Tensor], b: Tensor | None,
    rope: Tensor | None, bias: Tensor | None, q_weight: Tensor | None, q_bias: Tensor | None, k_weight: Tensor | None,
    k_bias: Tensor | None, sizes: Sequence[int], eps: Sequence[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    heads = _heads((rope, bias, q_weight, q_bias, k_weight, k_bias), sizes, eps)
    return _attend(linears(affine(x_hat, gamma, beta), w, b), heads, bias)


@_kept_attention.register_fake
def _(
    x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w: Sequence[Tensor], b: Tensor | None,
    rope: Tensor | None, bias: Tensor | None, q_weight: Tensor | None, q_bias: Tensor | None, k_weight: Tensor | None,
    k_bias: Tensor | None, sizes: Sequence[int], eps: Sequence[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    queries, keys = sizes[0], sizes[1]
    channels = sum(one.shape[0] for one in w) // (queries + 2 * keys)
    return x_hat.new_empty((*x_hat.shape[:2], queries * channels)), _lse_like(x_hat, queries)


@torch.library.custom_op("vtk_training::kept_attention_backward", mutates_args=())
@body
def _kept_attention_backward(
    g: Tensor, o: Tensor, lse: Tensor, x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w: Sequence[Tensor],
    b: Tensor | None, rope: Tensor | None, bias: Tensor | None, q_weight: Tensor | None, q_bias: Tensor | None,
    k_weight: Tensor | None, k_bias: Tensor | None, sizes: Sequence[int], eps: Sequence[float], need_x: bool,
    need_w: Sequence[bool], need_b: bool, need_small: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    heads = _heads((rope, bias, q_weight, q_bias, k_weight, k_bias), sizes, eps)
    qkv = linears(affine(x_hat, gamma, beta), w, b)
    grads, small = _attend_backward(g, o, lse, qkv, heads, bias, need_small)
    return [*small, *linear_gradients(grads, x_hat, gamma, beta, w, need_x, need_w, need_b)]


@_kept_attention_backward.register_fake
def _(
    g: Tensor, o: Tensor, lse: Tensor, x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w: Sequence[Tensor],
    b: Tensor | None, rope: Tensor | None, bias: Tensor | None, q_weight: Tensor | None, q_bias: Tensor | None,
    k_weight: Tensor | None, k_bias: Tensor | None, sizes: Sequence[int], eps: Sequence[float], need_x: bool,
    need_w: Sequence[bool], need_b: bool, need_small: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    small = _fake_small(g, (rope, bias, q_weight, q_bias, k_weight, k_bias), need_small)
    gb = g.new_empty(sum(one.shape[0] for one in w) if need_b else 0)
    gw = [one.new_empty(one.shape if need else 0) for one, need in zip(w, need_w, strict=True)]
    return [*small, x_hat.new_empty(x_hat.shape if need_x else 0), gb, *gw]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_hat, gamma, beta, w, *rest = inputs
    ctx.save_for_backward(*output, x_hat, gamma, beta, *rest[:-2], *w)
    ctx.numbers = rest[-2:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, g: Tensor | None, _: None) -> tuple[Any, ...]:
    need_x, _gamma, _beta, need_w, need_b, *need_small = ctx.needs_input_grad[: 5 + _SMALL]
    if g is None or not any([need_x, *need_w, need_b, *need_small]):
        return (None,) * 3 + ([None] * len(need_w),) + (None,) * (3 + _SMALL)
    o, lse, x_hat, gamma, beta, b, *rest = ctx.saved_tensors
    small, w = rest[:_SMALL], rest[_SMALL:]
    found = torch.ops.vtk_training.kept_attention_backward(
        g, o, lse, x_hat, gamma, beta, w, b, *small, *ctx.numbers, need_x, need_w, need_b, need_small
    )
    own, (gx, gb, *gw) = found[:_SMALL], found[_SMALL:]
    own = [one if need else None for one, need in zip(own, need_small, strict=True)]
    gw = [one if need else None for one, need in zip(gw, need_w, strict=True)]
    return gx if need_x else None, None, None, gw, gb if need_b else None, *own, None, None


_kept_attention.register_autograd(_differentiate, setup_context=_setup)


@torch.library.custom_op("vtk_training::attention_of", mutates_args=())
@body
def _attention_of(
    qkv: Sequence[Tensor], rope: Tensor | None, bias: Tensor | None, q_weight: Tensor | None, q_bias: Tensor | None,
    k_weight: Tensor | None, k_bias: Tensor | None, sizes: Sequence[int], eps: Sequence[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _attend(qkv, _heads((rope, bias, q_weight, q_bias, k_weight, k_bias), sizes, eps), bias)


@_attention_of.register_fake
def _(
    qkv: Sequence[Tensor], rope: Tensor | None, bias: Tensor | None, q_weight: Tensor | None, q_bias: Tensor | None,
    k_weight: Tensor | None, k_bias: Tensor | None, sizes: Sequence[int], eps: Sequence[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    queries, keys = sizes[0], sizes[1]
    channels = sum(one.shape[-1] for one in qkv) // (queries + 2 * keys)
    return qkv[0].new_empty((*qkv[0].shape[:2], queries * channels)), _lse_like(qkv[0], queries)


@torch.library.custom_op("vtk_training::attention_of_backward", mutates_args=())
@body
def _attention_of_backward(
    g: Tensor, o: Tensor, lse: Tensor, qkv: Sequence[Tensor], rope: Tensor | None, bias: Tensor | None,
    q_weight: Tensor | None, q_bias: Tensor | None, k_weight: Tensor | None, k_bias: Tensor | None,
    sizes: Sequence[int], eps: Sequence[float], need_small: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    heads = _heads((rope, bias, q_weight, q_bias, k_weight, k_bias), sizes, eps)
    grads, small = _attend_backward(g, o, lse, qkv, heads, bias, need_small)
    return [*small, *grads]


@_attention_of_backward.register_fake
def _(
    g: Tensor, o: Tensor, lse: Tensor, qkv: Sequence[Tensor], rope: Tensor | None, bias: Tensor | None,
    q_weight: Tensor | None, q_bias: Tensor | None, k_weight: Tensor | None, k_bias: Tensor | None,
    sizes: Sequence[int], eps: Sequence[float], need_small: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    small = _fake_small(g, (rope, bias, q_weight, q_bias, k_weight, k_bias), need_small)
    return [*small, *(one.new_empty(one.shape) for one in qkv)]


def _setup_of(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, *rest = inputs
    ctx.save_for_backward(*output, *rest[:-2], *qkv)
    ctx.numbers = rest[-2:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate_of(ctx: Any, g: Tensor | None, _: None) -> tuple[Any, ...]:
    needs, *need_small = ctx.needs_input_grad[: 1 + _SMALL]
    if g is None:
        return [None] * len(needs), *(None,) * (2 + _SMALL)
    o, lse, *rest = ctx.saved_tensors
    small, qkv = rest[:_SMALL], rest[_SMALL:]
    found = torch.ops.vtk_training.attention_of_backward(g, o, lse, qkv, *small, *ctx.numbers, need_small)
    own = [one if need else None for one, need in zip(found[:_SMALL], need_small, strict=True)]
    return found[_SMALL:], *own, None, None


_attention_of.register_autograd(_differentiate_of, setup_context=_setup_of)


def _pieces(heads: Heads, bias: Tensor | None) -> tuple[Any, ...]:
    """Return `Heads` and the bias as operators take them."""
    q, k = heads.q_norm, heads.k_norm
    sizes, eps = [heads.queries, heads.keys, int(heads.half), int(q.rms)], [q.eps, k.eps]
    return heads.rope, bias, q.weight, q.bias, k.weight, k.bias, sizes, eps


def kept_attention(
    x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w: Sequence[Tensor], b: Tensor | None, heads: Heads,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return self-attention of (x_hat ⊙ gamma + beta), before the output projection.

    Args:
        x_hat: (B, N, C), from `normalise` or any tokens.
        gamma: (C), frozen, of any floating type; or None.
        beta: (C), frozen; or None.
        w: weight of qkv ((H + 2 Hkv) D, C), or of queries, keys and values, the type of ``x_hat``.
        b: ((H + 2 Hkv) D); or None.
        heads: the type of ``x_hat``, but for the rotary table.
        bias: (H, N, N), the type of ``x_hat``, added to the scores; or None.

    Returns:
        (B, N, H D), contiguous.
    """
    o: Tensor = torch.ops.vtk_training.kept_attention(x_hat, gamma, beta, w, b, *_pieces(heads, bias))[0]
    return o


def attention_of(qkv: Sequence[Tensor], heads: Heads, bias: Tensor | None = None) -> Tensor:
    """Return attention of projections (B, N, (H + 2 Hkv) D), or of those of queries, keys and values, as (B, N, H D).

    Args:
        qkv: one tensor, or three.
        heads: as of `kept_attention`.
        bias: likewise.
    """
    o: Tensor = torch.ops.vtk_training.attention_of(qkv, *_pieces(heads, bias))[0]
    return o
