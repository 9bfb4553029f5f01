"""Attention in plain torch: of a few queries without keys and values, for CPUs, and in three products, for exporters.

Exporters want rotary embedding and grouped heads in the operators that runtimes fuse.

The scores do not change when q and k have their channels in another order, so pairs (2i, 2i + 1) become (i, i + D/2)
in the matrices, and a rotation is x ⊙ cos + swap(x) ⊙ sin, swap exchanging the halves of a head and sin holding the
sign. With prefix tokens in the tables nothing is cut off and put together again. The tables are constants.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk.fused.stages import frozen


def few_queries(q: Tensor, h: Tensor, w_k: Tensor, w_v: Tensor, b_v: Tensor, head_dim: int) -> Tensor:
    """Return softmax(q kᵀ) v for every head, k = h · w_kᵀ + b_k and v = h · w_vᵀ + b_v, for any b_k.

    Without a key or a value of any token, since both matrices can go to the queries' side:

        q·(W_k x + b_k) = (W_kᵀ q)·x + q·b_k,      Σⱼ pⱼ (W_v xⱼ + b_v) = W_v (Σⱼ pⱼ xⱼ) + b_v

    Exact: q·b_k is the same for all tokens, so softmax does not see it, and Σⱼ pⱼ is 1. For n queries, N tokens, C
    channels and H heads of D channels that is 4 n H C (D + N) operations in place of 4 N C H D for keys and values and
    4 n N H D for attention: of a ViT-S with one query and 197 tokens a forty-eighth part.

    Args:
        q: (B, n, H·D), 1/√D in it.
        h: (B, N, C).
        w_k, w_v: (H·D, C).
        b_v: (H·D).
        head_dim: D.

    Returns:
        (B, n, H·D).
    """
    batch, queries, width = q.shape
    heads, channels = width // head_dim, h.shape[2]
    q = q.view(batch * queries, heads, head_dim).transpose(0, 1)  # (H, B·n, D)
    projected = torch.bmm(q, w_k.view(heads, head_dim, channels))  # (H, B·n, C)
    projected = (
        projected.view(heads, batch, queries, channels).transpose(0, 1).reshape(batch, heads * queries, channels)
    )
    share = torch.softmax(torch.bmm(projected, h.transpose(1, 2)), -1)  # (B, H·n, N)
    mixed = torch.bmm(share, h).view(batch, heads, queries, channels).transpose(0, 1)
    mixed = mixed.reshape(heads, batch * queries, channels)
    o = torch.bmm(mixed, w_v.view(heads, head_dim, channels).transpose(1, 2))  # (H, B·n, D)
    return o.transpose(0, 1).reshape(batch, queries, width) + b_v


class Rotation(nn.Module):
    """Rotates q or k by constant tables.

    Attributes:
        cos: (N, 2, D/2), or (H, N, 2, D/2) where heads differ.
        sin: the same, negative for the first half.
        order: (2,), which exchanges the halves by one gather; None to put them together in the other order.
    """

    cos: Tensor
    sin: Tensor
    order: Tensor | None

    def __init__(self, rope: Tensor, *, gather: bool) -> None:
        """Take a table (N, D) or (H, N, D) of cosines, then sines."""
        super().__init__()
        cos, sin = rope.chunk(2, -1)
        self.cos, self.sin = frozen(torch.stack((cos, cos), -2)), frozen(torch.stack((-sin, sin), -2))
        self.register_buffer("order", torch.tensor([1, 0]) if gather else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate (B, H, N', D), the first N' tokens of an image."""
        cos, sin = self.cos, self.sin
        if x.shape[2] < cos.shape[-3]:
            cos, sin = (t[..., : x.shape[2], :, :] for t in (cos, sin))
        if self.order is None:
            swapped = torch.cat(x.chunk(2, -1)[::-1], -1)
            return x * cos.flatten(-2) + swapped * sin.flatten(-2)
        halves = x.unflatten(-1, (2, -1))
        return (halves * cos + halves.index_select(-2, self.order) * sin).flatten(-2)


def attend_separately(stage: Any, h: Tensor, queries: int | None) -> Tensor:
    """Return the attention of an `AttentionStage` after `separate_qkv`.

    Args:
        stage: with ``w_q`` and the others.
        h: normalised tokens (B, N, C).
        queries: compute so many of the first tokens only, None for all.

    Returns:
        (B, N', H·D).
    """
    q = F.linear(h if queries is None else h[:, :queries], stage.w_q, stage.b_q)
    k, v = F.linear(h, stage.w_k, stage.b_k), F.linear(h, stage.w_v, stage.b_v)
    q, k, v = (t.unflatten(-1, (-1, stage.head_dim)) for t in (q, k, v))
    if stage.qk_norm is not None:
        q, k = stage.qk_norm(q, k)
    q, v = q.transpose(1, 2), v.transpose(1, 2)  # (B, H, N', D), (B, K, N, D)
    if stage.rotation is None:
        k = k.permute(0, 2, 3, 1)
    else:
        q, k = stage.rotation(q), stage.rotation(k.transpose(1, 2)).transpose(2, 3)
    tokens, groups = q.shape[2], stage.num_heads // stage.num_kv_heads
    if groups > 1:  # heads that share keys are so many more queries: nothing is copied
        q = q.unflatten(1, (-1, groups)).flatten(2, 3)
    scores = torch.matmul(q, k)
    if stage.divisor is not None:
        scores = scores / stage.divisor
    if stage.attn_bias is not None:
        bias = stage.attn_bias()[:, :tokens, : v.shape[2]]
        scores = scores + (bias if groups == 1 else bias.unflatten(0, (-1, groups)).flatten(1, 2))
    o = torch.matmul(torch.softmax(scores, -1), v)
    if groups > 1:
        o = o.unflatten(2, (groups, -1)).flatten(1, 2)
    return o.transpose(1, 2).flatten(2)


def rotations(tables: Sequence[Tensor], *, gather: bool) -> list[Rotation]:
    """Return a `Rotation` for each table of a model; blocks of one table share it."""
    return [Rotation(table, gather=gather) for table in tables]


def halves_in_order(w: Tensor, b: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the rows of a matrix (H·D, C) and of its bias, of each head the even ones before the odd ones."""
    order = half_order(head_dim, w.device)
    return w.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1), b.unflatten(0, (-1, head_dim))[:, order].flatten()


def half_order(head_dim: int, device: torch.device) -> Tensor:
    """Return 0, 2, 4, …, 1, 3, 5, …: (D,)."""
    return torch.arange(head_dim, device=device).view(-1, 2).t().flatten()
