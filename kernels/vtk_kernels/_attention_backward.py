"""Gradient of `packed_attention`: attention again, then its derivatives, in an operator without an autograd graph.

    P = softmax(scale · q kᵀ),    gv = Pᵀ go,    gP = go vᵀ,    gz = P ⊙ (gP − Σ_keys gP ⊙ P)
    gq = scale · gz k,    gk = scale · gzᵀ q

Logits exist for a few images at a time, in fp32. For long sequences or whole runs of training SDPA itself is faster.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk_kernels._dispatch import LAUNCHES, accumulator
from vtk_kernels._segments import equal_runs

LAUNCHES["packed_attention_backward"] = 26  # torch's own, for one slice of a batch without row scale and bias

LOGITS = 1 << 24
"""Logits of one slice of the batch: 64 MiB in fp32."""


@torch.library.custom_op("vtk_kernels::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    g: Tensor,
    qkv: Tensor,
    num_heads: int,
    cu_seqlens: Tensor | None,
    num_queries: int | None,
    scale: float,
    row_scale: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of ``qkv``, ``row_scale`` and ``bias``.

    Args:
        g: gradient of the output of `packed_attention`; the others as there.

    Returns:
        Contiguous gradients like their operands; empty for one that is None.
    """
    unfolded = unfold(qkv, row_scale, bias)
    if cu_seqlens is None:
        gu = _batch(g, unfolded, num_heads, num_queries, scale)
    else:
        gu = torch.zeros_like(qkv, memory_format=torch.contiguous_format)
        segment = 0
        for first, count, length in equal_runs(cu_seqlens, len(qkv)):
            rows = slice(first, first + count * length)
            packed = unfolded[rows].reshape(count, length, qkv.shape[1])
            if num_queries is None:
                given = g[rows].reshape(count, length, g.shape[1])
            else:
                given = g[segment : segment + count, : min(num_queries, length)]
            gu[rows] = _batch(given, packed, num_heads, num_queries, scale).flatten(0, 1)
            segment += count
    if row_scale is None and bias is None:
        return gu, qkv.new_empty(0), qkv.new_empty(0)
    wide = gu.to(accumulator(gu.dtype))
    gs = qkv.new_empty(0) if row_scale is None else (wide * qkv).sum(-1).contiguous()
    gb = qkv.new_empty(0) if bias is None else wide.flatten(0, -2).sum(0).to(bias.dtype)
    gqkv = gu if row_scale is None else (wide * row_scale[..., None]).to(qkv.dtype)
    return gqkv.contiguous(), gs, gb


@packed_attention_backward.register_fake
def _(g: Tensor, qkv: Tensor, num_heads: int, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, row_scale, bias = options
    gqkv, gs, gb = (qkv.new_empty(0) if t is None else t.new_empty(t.shape) for t in (qkv, row_scale, bias))
    return gqkv, gs, gb


def unfold(qkv: Tensor, row_scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return row_scale · qkv + bias, computed in fp32 or fp64 and rounded once to the type of ``qkv``."""
    if row_scale is None and bias is None:
        return qkv
    wide = qkv.to(accumulator(qkv.dtype))
    wide = wide if row_scale is None else wide * row_scale[..., None]
    return (wide if bias is None else wide + bias.to(wide.dtype)).to(qkv.dtype)


def _batch(g: Tensor, qkv: Tensor, num_heads: int, num_queries: int | None, scale: float) -> Tensor:
    """(B, N', H·D), (B, N, 3·H·D) → (B, N, 3·H·D), a slice of the batch at a time."""
    if not g.numel():
        return torch.zeros_like(qkv, memory_format=torch.contiguous_format)
    step = max(LOGITS // (num_heads * g.shape[1] * qkv.shape[1]), 1)
    parts = [_slice(*pair, num_heads, num_queries, scale) for pair in zip(g.split(step), qkv.split(step), strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _slice(g: Tensor, qkv: Tensor, num_heads: int, num_queries: int | None, scale: float) -> Tensor:
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, N, D) each
    q, go = q[:, :, :num_queries], g.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    wide = accumulator(qkv.dtype)
    p = torch.softmax((q @ k.mT).to(wide) * scale, -1)
    gp = (go @ v.mT).to(wide)
    gz = (p * (gp - (gp * p).sum(-1, keepdim=True)) * scale).to(qkv.dtype)
    gq = F.pad(gz @ k, (0, 0, 0, k.shape[2] - q.shape[2]))
    found = torch.stack([gq, gz.mT @ q, p.to(qkv.dtype).mT @ go])
    return found.permute(1, 3, 0, 2, 4).flatten(2)
