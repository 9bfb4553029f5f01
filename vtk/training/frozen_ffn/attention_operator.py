"""Attention, from normalised tokens to its output, that saves neither queries, keys nor values for backward.

    qkv = (x_hat ⊙ γ + β) · wᵀ + b,    q, k = LayerNorm(q), LayerNorm(k) (qk-norm),    o = attention(q, k, v)

Kept: x_hat (which the norm keeps anyway), o (which the projection behind keeps anyway) and logsumexp. The backward
computes qkv again, not the attention.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.training.frozen_ffn._bodies import affine, body, linear_gradients
from vtk.training.frozen_ffn.flash import attention, attention_backward


@dataclass(frozen=True)
class HeadNorm:
    """LayerNorm of each head's queries or keys.

    Attributes:
        weight: (D), or None.
        bias: (D), or None.
        eps: added to the variance.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float


def _split(x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w: Tensor, b: Tensor | None, heads: int) -> Any:
    """Return q, k and v, each (B, H, N, D)."""
    qkv = F.linear(affine(x_hat, gamma, beta), w, b)
    return qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


@torch.library.custom_op("vtk_training::kept_attention", mutates_args=())
@body
def _kept_attention(
    x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w: Tensor, b: Tensor | None, q_weight: Tensor | None,
    q_bias: Tensor | None, k_weight: Tensor | None, k_bias: Tensor | None, heads: int, q_eps: float, k_eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = _split(x_hat, gamma, beta, w, b, heads)
    if q_eps >= 0:
        q = F.layer_norm(q, q.shape[-1:], q_weight, q_bias, q_eps)
    if k_eps >= 0:
        k = F.layer_norm(k, k.shape[-1:], k_weight, k_bias, k_eps)
    o, lse = attention(q, k, v)
    return o.flatten(2), lse


@_kept_attention.register_fake
def _(
    x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w: Tensor, b: Tensor | None, q_weight: Tensor | None,
    q_bias: Tensor | None, k_weight: Tensor | None, k_bias: Tensor | None, heads: int, q_eps: float, k_eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    images, tokens, _ = x_hat.shape
    wide = torch.promote_types(x_hat.dtype, torch.float32)
    return x_hat.new_empty((images, tokens, w.shape[0] // 3)), x_hat.new_empty((images, heads, tokens), dtype=wide)


@torch.library.custom_op("vtk_training::kept_attention_backward", mutates_args=())
@body
def _kept_attention_backward(
    g: Tensor, o: Tensor, lse: Tensor, x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w: Tensor,
    b: Tensor | None, q_weight: Tensor | None, q_bias: Tensor | None, k_weight: Tensor | None, k_bias: Tensor | None,
    heads: int, q_eps: float, k_eps: float, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    q, k, v = _split(x_hat, gamma, beta, w, b, heads)
    normed_q, q_stats = _head_norm(q, q_weight, q_bias, q_eps)
    normed_k, k_stats = _head_norm(k, k_weight, k_bias, k_eps)
    shape = (heads, g.shape[-1] // heads)
    gq, gk, gv = attention_backward(g.unflatten(-1, shape), normed_q, normed_k, v, o.unflatten(-1, shape), lse)
    gq, *q_grads = _head_norm_backward(gq, q, q_stats, q_weight, q_bias, needs[5:7])
    gk, *k_grads = _head_norm_backward(gk, k, k_stats, k_weight, k_bias, needs[7:9])
    # (B, N, 3, H, D), as qkv lies in memory
    gqkv = torch.stack([gq.transpose(1, 2), gk.transpose(1, 2), gv.transpose(1, 2)], dim=2).flatten(2)
    gx, gw, gb = linear_gradients(gqkv, x_hat, gamma, beta, w, needs[0], needs[3], needs[4])
    return [gx, gw, gb, *q_grads, *k_grads]


@_kept_attention_backward.register_fake
def _(
    g: Tensor, o: Tensor, lse: Tensor, x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w: Tensor,
    b: Tensor | None, q_weight: Tensor | None, q_bias: Tensor | None, k_weight: Tensor | None, k_bias: Tensor | None,
    heads: int, q_eps: float, k_eps: float, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    like = [(x_hat, 0), (w, 3), (b, 4), (q_weight, 5), (q_bias, 6), (k_weight, 7), (k_bias, 8)]
    return [t.new_empty(t.shape) if t is not None and needs[i] else g.new_empty(0) for t, i in like]


def _head_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Any]:
    if eps < 0:
        return x, None
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return y, (mean, rstd)


def _head_norm_backward(
    g: Tensor, x: Tensor, stats: Any, weight: Tensor | None, bias: Tensor | None, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    if stats is None:
        return g, g.new_empty(0), g.new_empty(0)
    mask = [True, needs[0], needs[1]]
    gx, gw, gb = torch.ops.aten.native_layer_norm_backward(g, x, x.shape[-1:], *stats, weight, bias, mask)
    return gx, gw if needs[0] else g.new_empty(0), gb if needs[1] else g.new_empty(0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:9])
    ctx.numbers = inputs[9:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:9])
    if g is None or not any(needs):
        return (None,) * 12
    found = iter(torch.ops.vtk_training.kept_attention_backward(g, *ctx.saved_tensors, *ctx.numbers, needs))
    gx, gw, gb, *head_norms = (grad if needs[i] else None for i, grad in zip((0, 3, 4, 5, 6, 7, 8), found, strict=True))
    return gx, None, None, gw, gb, *head_norms, None, None, None


_kept_attention.register_autograd(_differentiate, setup_context=_setup)


def kept_attention(
    x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w: Tensor, b: Tensor | None, heads: int,
    q_norm: HeadNorm | None = None, k_norm: HeadNorm | None = None,
) -> Tensor:  # fmt: skip
    """Return self-attention of (x_hat ⊙ gamma + beta), before the output projection.

    Args:
        x_hat: (B, N, C), from `normalise` or any tokens.
        gamma: (C), frozen, of any floating type; or None.
        beta: (C), frozen; or None.
        w: (3 H D, C), weight of qkv, the type of ``x_hat``.
        b: (3 H D); or None.
        heads: H.
        q_norm: norm of the queries, the type of ``x_hat``; or None.
        k_norm: norm of the keys; or None.

    Returns:
        (B, N, H D), contiguous.
    """
    q, k = q_norm or HeadNorm(None, None, -1.0), k_norm or HeadNorm(None, None, -1.0)
    o: Tensor = torch.ops.vtk_training.kept_attention(
        x_hat, gamma, beta, w, b, q.weight, q.bias, k.weight, k.bias, heads, q.eps, k.eps
    )[0]
    return o
