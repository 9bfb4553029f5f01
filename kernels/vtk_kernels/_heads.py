"""Queries and keys on their way into attention: norms of heads, rotary embedding, fewer heads of keys and values.

    q, k ← norm(q), norm(k) over the channels of a head         (LayerNorm or RMSNorm, each with its own affine part)
    (x₁, x₂) ← (x₁ cos θ − x₂ sin θ, x₂ cos θ + x₁ sin θ)       per pair of channels; θ by the token's row of a table
    o = softmax(scale · q kᵀ + bias) v                          query head h reads key head h · Hkv / H

Su et al., RoFormer (2021), eq. 34; Ainslie et al., GQA (2023). The order is timm's: norm, rotation, scores.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk_kernels._dispatch import accumulator


class HeadNorms(NamedTuple):
    """Norms of queries and keys over the channels of a head.

    Attributes:
        kind: LayerNorm or RMSNorm.
        eps: under the root.
        q_weight: (H, D) or None for 1, any floating type; (S, H, D) with ``slot``.
        q_bias: like ``q_weight``, None for 0.
        k_weight: (Hkv, D) or None, (S, Hkv, D) with ``slot``.
        k_bias: like ``k_weight``.
        slot: (segments or B,) int32: which of S norms an image has; None where all have the same.
    """

    kind: Literal["layer", "rms"]
    eps: float
    q_weight: Tensor | None = None
    q_bias: Tensor | None = None
    k_weight: Tensor | None = None
    k_bias: Tensor | None = None
    slot: Tensor | None = None


class Heads(NamedTuple):
    """What `packed_attention` does to heads; its arguments of these names."""

    num_heads: int
    num_kv_heads: int
    rope: Tensor | None = None
    rotate_half: bool = False
    rope_row: Tensor | None = None
    qk_norm: HeadNorms | None = None
    attn_bias: Tensor | None = None

    @property
    def parts(self) -> int:
        """Heads of queries, keys and values together: columns of ``qkv`` by D."""
        return self.num_heads + 2 * self.num_kv_heads

    @property
    def plain(self) -> bool:
        """Whether attention is that of packed heads alone."""
        extra = (self.rope, self.qk_norm, self.attn_bias)
        return self.num_heads == self.num_kv_heads and all(value is None for value in extra)


def check_heads(qkv: Tensor, heads: Heads, cu_seqlens: Tensor | None) -> None:
    """Refuse tables, norms and biases that do not fit ``qkv`` (B, N, C) or (T, C), C being a multiple of the parts.

    Raises:
        ValueError: another shape, type or device.
    """
    h, kv, d = heads.num_heads, heads.num_kv_heads, qkv.shape[-1] // heads.parts
    rope, norm, bias = heads.rope, heads.qk_norm, heads.attn_bias
    longest = qkv.shape[1] if cu_seqlens is None else 0
    if rope is not None:
        wide = accumulator(qkv.dtype)
        if d % 2:
            raise ValueError(f"`rope` turns pairs of channels; the heads of `qkv` have {d}, an odd number")
        known = rope.ndim == 2 or (rope.ndim == 3 and len(rope) == h == kv)
        if not known or rope.shape[-1] != d or rope.dtype != wide:
            per_head = f"({h}, R, {d})" if h == kv else "no table per head where keys have fewer heads"
            raise ValueError(f"`rope` is {tuple(rope.shape)} {rope.dtype}; it must be (R, {d}) {wide}, or {per_head}")
        if heads.rope_row is None and rope.shape[-2] < longest:
            raise ValueError(f"`rope` has {rope.shape[-2]} rows; {longest} tokens need one each, or `rope_row`")
    if heads.rope_row is not None:
        row = heads.rope_row
        if rope is None:
            raise ValueError("`rope_row` needs `rope`, the table that it points into")
        if row.shape != qkv.shape[:-1] or row.dtype != torch.int32:
            raise ValueError(f"`rope_row` is {tuple(row.shape)} {row.dtype}; it must be {tuple(qkv.shape[:-1])} int32")
    if norm is not None:
        _check_norms(norm, h, kv, d, len(qkv) if cu_seqlens is None else len(cu_seqlens) - 1)
    if bias is not None:
        square = bias.ndim == 3 and bias.shape[1] == bias.shape[2]
        if not square or len(bias) != h or bias.shape[1] < longest or not bias.is_floating_point():
            tokens = longest or "N"
            raise ValueError(
                f"`attn_bias` is {tuple(bias.shape)} {bias.dtype}; it must be ({h}, {tokens}, {tokens}) or larger, "
                "floating point"
            )
    norms = () if norm is None else norm[2:]
    named = dict(zip((*HeadNorms._fields[2:], "rope", "rope_row", "attn_bias"), (*norms,) or (None,) * 5, strict=False))
    named |= {"rope": rope, "rope_row": heads.rope_row, "attn_bias": bias}
    for name, t in named.items():
        if t is not None and t.device != qkv.device:
            raise ValueError(f"`{name}` is on {t.device}; it must be on the device of `qkv`, {qkv.device}")


def _check_norms(norm: HeadNorms, h: int, kv: int, d: int, images: int) -> None:
    if norm.kind not in ("layer", "rms"):
        raise ValueError(f"`qk_norm` is of kind {norm.kind!r}; it must be 'layer' or 'rms'")
    if not norm.eps >= 0:
        raise ValueError(f"`qk_norm` has eps {norm.eps}; it must be at least 0")
    slots = {len(t) for t in norm[2:6] if t is not None and t.ndim == 3} if norm.slot is not None else set()
    for name, t, count in zip(HeadNorms._fields[2:6], norm[2:6], (h, h, kv, kv), strict=True):
        wanted = (count, d) if norm.slot is None else (max(slots, default=1), count, d)
        if t is not None and (tuple(t.shape) != wanted or not t.is_floating_point()):
            shown = wanted if norm.slot is None else f"(S, {count}, {d}) with `slot`"
            raise ValueError(f"`{name}` is {tuple(t.shape)} {t.dtype}; it must be {shown}, floating point")
    if norm.slot is not None and (norm.slot.shape != (images,) or norm.slot.dtype != torch.int32):
        raise ValueError(f"`slot` is {tuple(norm.slot.shape)} {norm.slot.dtype}; it must be ({images},) int32")


def split(qkv: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Return views of ``qkv`` (B, N, C): queries and keys (B, N, H + Hkv, D), and values (B, N, Hkv, D)."""
    packed = qkv.unflatten(-1, (heads.parts, -1))
    return packed[..., : heads.num_heads + heads.num_kv_heads, :], packed[
        ..., heads.num_heads + heads.num_kv_heads :, :
    ]


def prepare(qk: Tensor, heads: Heads, row: Tensor | None, slot: Tensor | None) -> Tensor:
    """Normalise and rotate queries and keys; sums and angles in fp32, or fp64, rounded once.

    Args:
        qk: (B, N, H + Hkv, D) of `split`.
        heads: the norms and the table.
        row: (B, N) of the table; None for the first N.
        slot: (B,) of the norms, or None.
    """
    if heads.rope is None and heads.qk_norm is None:
        return qk
    wide = qk.to(accumulator(qk.dtype))
    if heads.qk_norm is not None:
        wide = normalise(wide, heads.qk_norm)
        weight, bias = affine(heads, slot, wide)
        wide = wide if weight is None else wide * weight
        wide = wide if bias is None else wide + bias
    if heads.rope is not None:
        wide = rotate(wide, *table(heads, qk.shape[1], row), heads.rotate_half)
    return wide.to(qk.dtype)


def normalise(x: Tensor, norm: HeadNorms) -> Tensor:
    """Return ``x`` (..., D) of mean 0 and variance 1, or of mean square 1."""
    if norm.kind == "layer":
        return F.layer_norm(x, x.shape[-1:], None, None, norm.eps)
    return F.rms_norm(x, x.shape[-1:], None, norm.eps)


def affine(heads: Heads, slot: Tensor | None, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return weight and bias of all heads of queries and keys, (H + Hkv, D) or (B, 1, H + Hkv, D), or None."""
    assert heads.qk_norm is not None
    _, _, qw, qb, kw, kb, _ = heads.qk_norm
    found: list[Tensor | None] = []
    for q, k, fill in ((qw, kw, 1.0), (qb, kb, 0.0)):
        if q is None and k is None:
            found.append(None)
            continue
        pair = []
        for t, count in ((q, heads.num_heads), (k, heads.num_kv_heads)):
            if t is None:
                other = k if q is None else q
                assert other is not None
                t = like.new_full((*other.shape[:-2], count, like.shape[-1]), fill)
            pair.append(t.to(like.dtype))
        both = torch.cat(pair, -2)
        found.append(both if slot is None else both[slot.long()][:, None])
    return found[0], found[1]


def table(heads: Heads, tokens: int, row: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return cos and sin of each token and head, to multiply with (B, N, H + Hkv, D / 2)."""
    assert heads.rope is not None
    rope = heads.rope
    rows = rope[..., :tokens, :] if row is None else rope[..., row.long(), :]  # (…, D) of (N,) or (B, N)
    if rope.ndim == 2:
        rows = rows.unsqueeze(-2)  # (…, N, 1, D)
    else:
        rows = rows.movedim(0, -2)  # (…, N, H, D)
        rows = torch.cat([rows, rows], -2)  # of queries, and of keys
    cos, sin = rows.chunk(2, -1)
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor, half: bool) -> Tensor:
    """Turn each pair of channels of ``x`` (..., D) by its angle: (i, i + D/2) if ``half``, else (2i, 2i+1)."""
    a, b = x.chunk(2, -1) if half else x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat(turned, -1) if half else torch.stack(turned, -1).flatten(-2)
