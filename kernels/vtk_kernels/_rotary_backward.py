"""Gradient of attention of prepared heads: preparation and attention again, then their derivatives.

    x̂ = norm(u),  n = w ⊙ x̂ + b,  q = R n          per head; R turns pairs by the table's angles, R⁻¹ turns them back
    gn = R⁻¹ gq,    gw = Σ gn ⊙ x̂,    gb = Σ gn,    gu = rstd · (gx̂ − [mean gx̂] − x̂ · mean(gx̂ ⊙ x̂)),   gx̂ = w ⊙ gn

[·] for LayerNorm alone. Attention's own derivatives are those of `vtk_kernels._attention_backward`; the bias of the
logits has Σ over images of gz / scale. Logits exist for a few images at a time, in fp32.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk_kernels._attention_backward import LOGITS, unfold
from vtk_kernels._attention_reference import of_run
from vtk_kernels._dispatch import LAUNCHES, accumulator
from vtk_kernels._heads import HeadNorms, Heads, affine, normalise, rotate, split, table
from vtk_kernels._segments import equal_runs

LAUNCHES["rotary_attention_backward"] = 58  # torch's own, for one slice of a batch with a table of all heads


class Sums(NamedTuple):
    """Gradients of what all images share, in the type of sums; None for what is not there."""

    rope: Tensor | None
    weight: Tensor | None  # (H + Hkv, D) or (S, H + Hkv, D)
    shift: Tensor | None
    attn_bias: Tensor | None


def backward(
    g: Tensor,
    qkv: Tensor,
    heads: Heads,
    cu_seqlens: Tensor | None,
    num_queries: int | None,
    scale: float,
    row_scale: Tensor | None,
    bias: Tensor | None,
) -> dict[str, Tensor | None]:
    """Return the gradients of ``qkv`` and of all tensors beside it, by the names of their arguments and of the norms.

    Args:
        g: gradient of the output; the others as of `packed_attention`.
    """
    u, sums = unfold(qkv, row_scale, bias), _zeros(heads, qkv)
    slot = None if heads.qk_norm is None else heads.qk_norm.slot
    if cu_seqlens is None:
        gu = _batch(g, u, heads, num_queries, scale, heads.rope_row, slot, sums)
    else:
        gu, segment = torch.zeros_like(qkv, memory_format=torch.contiguous_format), 0
        for first, count, length in equal_runs(cu_seqlens, len(qkv)):
            rows = slice(first, first + count * length)
            packed = u[rows].reshape(count, length, qkv.shape[1])
            if num_queries is None:
                given = g[rows].reshape(count, length, g.shape[1])
            else:
                given = g[segment : segment + count, : min(num_queries, length)]
            of_these = of_run(heads, first, count, length, segment)
            gu[rows] = _batch(given, packed, heads, num_queries, scale, *of_these, sums).flatten(0, 1)
            segment += count
    wide = gu.to(accumulator(gu.dtype))
    found: dict[str, Tensor | None] = {
        "qkv": (gu if row_scale is None else (wide * row_scale[..., None]).to(qkv.dtype)).contiguous(),
        "row_scale": None if row_scale is None else (wide * qkv).sum(-1).contiguous(),
        "bias": None if bias is None else wide.flatten(0, -2).sum(0).to(bias.dtype),
        "rope": sums.rope,
        "attn_bias": _like(sums.attn_bias, heads.attn_bias),
    }
    for names, total in ((("q_weight", "k_weight"), sums.weight), (("q_bias", "k_bias"), sums.shift)):
        for name, part in zip(names, (slice(0, heads.num_heads), slice(heads.num_heads, None)), strict=True):
            t = None if heads.qk_norm is None else getattr(heads.qk_norm, name)
            found[name] = None if total is None else _like(total[..., part, :], t)
    return found


def _like(total: Tensor | None, t: Tensor | None) -> Tensor | None:
    """Return a sum in the type of its tensor, None for one that is not there, in memory of its own."""
    return None if total is None or t is None else total.to(t.dtype, copy=True, memory_format=torch.contiguous_format)


def _zeros(heads: Heads, qkv: Tensor) -> Sums:
    wide, norm = accumulator(qkv.dtype), heads.qk_norm
    both = heads.num_heads + heads.num_kv_heads

    def like(*tensors: Tensor | None) -> Tensor | None:
        given = [t for t in tensors if t is not None]
        return qkv.new_zeros((*given[0].shape[:-2], both, given[0].shape[-1]), dtype=wide) if given else None

    return Sums(
        None if heads.rope is None else torch.zeros_like(heads.rope, memory_format=torch.contiguous_format),
        None if norm is None else like(norm.q_weight, norm.k_weight),
        None if norm is None else like(norm.q_bias, norm.k_bias),
        None if heads.attn_bias is None else qkv.new_zeros(heads.attn_bias.shape, dtype=wide),
    )


def _batch(
    g: Tensor,
    u: Tensor,
    heads: Heads,
    num_queries: int | None,
    scale: float,
    row: Tensor | None,
    slot: Tensor | None,
    sums: Sums,
) -> Tensor:
    """(B, N', H·D), (B, N, C) → (B, N, C), a slice of the batch at a time; adds to ``sums``."""
    if not g.numel():
        return torch.zeros_like(u, memory_format=torch.contiguous_format)
    step = max(LOGITS // (heads.num_heads * g.shape[1] * u.shape[1]), 1)
    parts = []
    for i in range(0, len(u), step):
        at = slice(i, i + step)
        own_row, own_slot = None if row is None else row[at], None if slot is None else slot[at]
        parts.append(_slice(g[at], u[at], heads, num_queries, scale, own_row, own_slot, sums))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _slice(
    g: Tensor,
    u: Tensor,
    heads: Heads,
    num_queries: int | None,
    scale: float,
    row: Tensor | None,
    slot: Tensor | None,
    sums: Sums,
) -> Tensor:
    h = heads.num_heads
    qk, v = split(u, heads)
    raw = qk.to(accumulator(u.dtype))
    unit = raw if heads.qk_norm is None else normalise(raw, heads.qk_norm)
    weight, shift = (None, None) if heads.qk_norm is None else affine(heads, slot, unit)
    plain = unit if weight is None else unit * weight
    plain = plain if shift is None else plain + shift
    turn = None if heads.rope is None else table(heads, u.shape[1], row)
    turned = (plain if turn is None else rotate(plain, *turn, heads.rotate_half)).to(u.dtype)

    gq, gk, gv = _attention(g, turned[..., :h, :], turned[..., h:, :], v, heads, num_queries, scale, sums)
    gn = torch.cat([gq, gk], 2).to(raw.dtype)  # (B, N, H + Hkv, D)
    if turn is not None:
        cos, sin = turn
        assert sums.rope is not None
        _add_angles(gn, plain, heads, row, sums.rope)
        gn = rotate(gn, cos, -sin, heads.rotate_half)
    if heads.qk_norm is not None:
        for total, part in ((sums.weight, gn * unit), (sums.shift, gn)):
            if total is None:
                continue
            if slot is None:
                total += part.sum((0, 1))
            else:
                total.index_add_(0, slot.long(), part.sum(1))
        gn = _norm_backward(gn if weight is None else gn * weight, raw, unit, heads.qk_norm)
    return torch.cat([gn.to(u.dtype), gv], 2).flatten(2)


def _attention(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, heads: Heads, num_queries: int | None, scale: float, sums: Sums
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q (B, N, H, D), and of k and v (B, N, Hkv, D)."""
    wide, group = accumulator(q.dtype), heads.num_heads // heads.num_kv_heads
    q = (q if num_queries is None else q[:, :num_queries]).transpose(1, 2)
    go = g.unflatten(-1, (heads.num_heads, -1)).transpose(1, 2)
    k, v = (t.transpose(1, 2) for t in (k, v))
    k, v = (t if group == 1 else t.repeat_interleave(group, 1) for t in (k, v))  # (B, H, N, D)
    z = (q @ k.mT).to(wide) * scale
    if heads.attn_bias is not None:
        z = z + heads.attn_bias[:, : z.shape[2], : z.shape[3]].to(wide)
    p = torch.softmax(z, -1)
    gp = (go @ v.mT).to(wide)
    gz = p * (gp - (gp * p).sum(-1, keepdim=True))
    if sums.attn_bias is not None:
        sums.attn_bias[:, : gz.shape[2], : gz.shape[3]] += gz.sum(0)
    gz = (gz * scale).to(q.dtype)
    gq = F.pad(gz @ k, (0, 0, 0, k.shape[2] - q.shape[2]))
    gk, gv = gz.mT @ q, p.to(q.dtype).mT @ go
    if group > 1:
        gk, gv = (t.unflatten(1, (-1, group)).sum(2) for t in (gk, gv))
    gq, gk, gv = (t.transpose(1, 2) for t in (gq, gk, gv))
    return gq, gk, gv


def _add_angles(g: Tensor, x: Tensor, heads: Heads, row: Tensor | None, total: Tensor) -> None:
    """Add the gradient of the table: of x (B, N, H + Hkv, D) before the rotation, and g behind it."""
    (ga, gb), (a, b) = (t.chunk(2, -1) if heads.rotate_half else t.unflatten(-1, (-1, 2)).unbind(-1) for t in (g, x))
    found = torch.cat([ga * a + gb * b, gb * a - ga * b], -1)  # (B, N, H + Hkv, D): of cos, of sin
    if total.ndim == 2:
        found = found.sum(2)
    else:
        found = (found[:, :, : heads.num_heads] + found[:, :, heads.num_heads :]).permute(2, 0, 1, 3)  # (H, B, N, D)
    if row is None:
        total[..., : found.shape[-2], :] += found.sum(-3)
    else:
        total.index_add_(-2, row.flatten().long(), found.flatten(-3, -2))


def _norm_backward(g: Tensor, raw: Tensor, unit: Tensor, norm: HeadNorms) -> Tensor:
    layer = norm.kind == "layer"
    centred = raw - raw.mean(-1, keepdim=True) if layer else raw
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + norm.eps)
    inner = g - unit * (g * unit).mean(-1, keepdim=True)
    return rstd * (inner - g.mean(-1, keepdim=True) if layer else inner)
