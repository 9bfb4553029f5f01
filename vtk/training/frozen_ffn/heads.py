"""Queries, keys and values between their projection and attention: norms of heads, rotation, shared heads of keys.

    q, k = rotate(norm(q)), rotate(norm(k)),    k, v repeated for the heads of queries that share them

In timm's order. All of it is computed again from the projections in backward, so that nothing of it is kept.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.training.frozen_ffn.rotary import rope_gradient, rotate
from vtk_kernels.norm import norm_backward_ref, norm_ref


class HeadNorm(NamedTuple):
    """LayerNorm or RMSNorm of each head's queries or keys.

    Attributes:
        weight: (D), or None.
        bias: (D), or None.
        eps: added to the variance or the mean square; negative for no norm.
        rms: RMSNorm.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    rms: bool = False


NO_NORM = HeadNorm(None, None, -1.0)


class Heads(NamedTuple):
    """How projections become heads.

    Attributes:
        queries: H.
        keys: heads of keys and values, of which H is a multiple.
        q_norm: of queries.
        k_norm: of keys.
        rope: table as of `vtk.training.frozen_ffn.rotary.rotate`, or None.
        half: whether its pairs are (i, i + D/2).
    """

    queries: int
    keys: int
    q_norm: HeadNorm = NO_NORM
    k_norm: HeadNorm = NO_NORM
    rope: Tensor | None = None
    half: bool = False


class HeadGradients(NamedTuple):
    """Gradients of `prepare`: of queries, keys, values (B, N, H, D), of the table and of the norms' weights."""

    q: Tensor
    k: Tensor
    v: Tensor
    rope: Tensor | None
    q_weight: Tensor | None
    q_bias: Tensor | None
    k_weight: Tensor | None
    k_bias: Tensor | None


def split(qkv: Sequence[Tensor], heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (B, N, H, D), keys and values (B, N, Hkv, D): views of one projection, or of three."""
    if len(qkv) == 1:
        channels = qkv[0].shape[-1] // (heads.queries + 2 * heads.keys)
        parts = qkv[0].unflatten(-1, (-1, channels)).split((heads.queries, heads.keys, heads.keys), dim=2)
        return parts[0], parts[1], parts[2]
    sizes = (heads.queries, heads.keys, heads.keys)
    q, k, v = (part.unflatten(-1, (size, -1)) for part, size in zip(qkv, sizes, strict=True))
    return q, k, v


def prepare(qkv: Sequence[Tensor], heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as attention takes them, each (B, H, N, D)."""
    q, k, v = split(qkv, heads)
    q, k = (_norm(x, n)[0] for x, n in ((q, heads.q_norm), (k, heads.k_norm)))
    if heads.rope is not None:
        q, k = (rotate(x, heads.rope, heads.half) for x in (q, k))
    groups = heads.queries // heads.keys
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return q, k, v


def prepare_backward(
    gq: Tensor, gk: Tensor, gv: Tensor, qkv: Sequence[Tensor], heads: Heads, rope_needs: bool
) -> HeadGradients:
    """Return the gradients of the projections and of what `heads` holds.

    Args:
        gq: (B, H, N, D), gradient of `prepare`'s first result.
        gk: likewise.
        gv: likewise.
        qkv: as of `prepare`.
        heads: likewise.
        rope_needs: whether the table's gradient is wanted.
    """
    q, k, _ = split(qkv, heads)
    if heads.keys < heads.queries:
        gk, gv = (g.unflatten(1, (heads.keys, -1)).sum(2) for g in (gk, gv))
    gq, gk, gv = (g.transpose(1, 2) for g in (gq, gk, gv))
    (normed_q, q_stats), (normed_k, k_stats) = _norm(q, heads.q_norm), _norm(k, heads.k_norm)
    g_rope: Tensor | None = None
    if heads.rope is not None:
        if rope_needs:
            g_rope = rope_gradient(gq, normed_q, heads.rope, heads.half)
            g_rope += rope_gradient(gk, normed_k, heads.rope, heads.half)
        gq, gk = (rotate(g, heads.rope, heads.half, back=True) for g in (gq, gk))
    gq, *q_grads = _norm_backward(gq, q, q_stats, heads.q_norm)
    gk, *k_grads = _norm_backward(gk, k, k_stats, heads.k_norm)
    return HeadGradients(gq, gk, gv, g_rope, *q_grads, *k_grads)


def _norm(x: Tensor, norm: HeadNorm) -> tuple[Tensor, Any]:
    if norm.eps < 0:
        return x, None
    if norm.rms:
        return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps), ()
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    return y, (mean, rstd)


def _norm_backward(g: Tensor, x: Tensor, stats: Any, norm: HeadNorm) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if stats is None:
        return g, None, None
    if not norm.rms:
        mask = [True, norm.weight is not None, norm.bias is not None]
        back = torch.ops.aten.native_layer_norm_backward
        gx, gw, gb = back(g, x, x.shape[-1:], *stats, norm.weight, norm.bias, mask)
        return gx, gw, gb
    wide = torch.promote_types(x.dtype, torch.float32)
    x_hat, rstd = norm_ref(x.to(wide), norm.eps, rms=True)
    gw = None if norm.weight is None else (g.to(wide) * x_hat).flatten(0, -2).sum(0).to(norm.weight.dtype)
    gx = norm_backward_ref(g if norm.weight is None else g * norm.weight, x_hat, rstd, rms=True)
    return gx.to(x.dtype), gw, None
