"""Attention by torch: of whole batches in one SDPA, of segments in one SDPA per run of equal lengths."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk_kernels._attention_backward import unfold
from vtk_kernels._heads import Heads, prepare, split
from vtk_kernels._segments import equal_runs


def attend(
    qkv: Tensor,
    heads: Heads,
    num_queries: int | None = None,
    scale: float = 1.0,
    row: Tensor | None = None,
    slot: Tensor | None = None,
) -> Tensor:
    """Return attention of a batch, (B, N', H·D).

    Args:
        qkv: (B, N, (H + 2·Hkv)·D).
        heads: what happens to queries and keys, and the logits' bias.
        num_queries: as of `packed_attention`.
        scale: of the logits.
        row: (B, N) of the rotary table; None: the first N.
        slot: (B,) of the norms, or None.
    """
    qk, v = split(qkv, heads)
    qk = prepare(qk, heads, row, slot)
    q, k = qk[..., : heads.num_heads, :], qk[..., heads.num_heads :, :]
    q, k, v = (t.transpose(1, 2) for t in (q if num_queries is None else q[:, :num_queries], k, v))
    if heads.num_kv_heads < heads.num_heads:
        k, v = (t.repeat_interleave(heads.num_heads // heads.num_kv_heads, 1) for t in (k, v))
    bias = heads.attn_bias
    if bias is not None:
        bias = bias[:, : q.shape[2], : k.shape[2]].to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, bias, scale=scale).transpose(1, 2).flatten(2)


def reference(
    qkv: Tensor,
    heads: Heads,
    cu_seqlens: Tensor | None = None,
    num_queries: int | None = None,
    scale: float = 1.0,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Compute `packed_attention` of any heads; arguments, result and errors as of `packed_attention_ref`."""
    slot = None if heads.qk_norm is None else heads.qk_norm.slot
    qkv = unfold(qkv, row_scale, bias)
    if cu_seqlens is None:
        return attend(qkv, heads, num_queries, scale, heads.rope_row, slot)
    width, row, segment, parts = qkv.shape[1] // heads.parts * heads.num_heads, 0, 0, []
    for first, count, length in equal_runs(cu_seqlens, len(qkv), max_seqlen):
        row = first + count * length
        packed = qkv[first:row].reshape(count, length, qkv.shape[1])
        found = attend(packed, heads, num_queries, scale, *of_run(heads, first, count, length, segment))
        segment += count
        # a segment that has fewer tokens than queries gets zeros for the rest
        parts.append(
            found.flatten(0, 1) if num_queries is None else F.pad(found, (0, 0, 0, num_queries - found.shape[1]))
        )
    if num_queries is None:
        parts.append(qkv.new_zeros(len(qkv) - row, width))
    return torch.cat(parts) if parts else qkv.new_zeros(0, num_queries or 0, width)


def of_run(heads: Heads, first: int, count: int, length: int, segment: int) -> tuple[Tensor | None, Tensor | None]:
    """Return rows of the rotary table (count, length) and slots of the norms (count,) of a run of equal segments.

    Args:
        heads: of all segments.
        first: row of the run's first token.
        count: segments.
        length: of each.
        segment: number of the first.

    Raises:
        ValueError: the table or the logits' bias has fewer rows than a segment.
    """
    rope, bias, row = heads.rope, heads.attn_bias, heads.rope_row
    slot = None if heads.qk_norm is None else heads.qk_norm.slot
    if rope is not None and row is None and rope.shape[-2] < length:
        raise ValueError(f"`rope` has {rope.shape[-2]} rows; a segment of {length} tokens needs as many, or `rope_row`")
    if bias is not None and bias.shape[1] < length:
        raise ValueError(f"`attn_bias` is {tuple(bias.shape)}; a segment has {length} tokens")
    return (
        None if row is None else row[first : first + count * length].reshape(count, length),
        None if slot is None else slot[segment : segment + count],
    )
