"""Kernel of `packed_attention` whose queries and keys are prepared on their way in, and its launch settings.

A head's tile is two halves, the first and the second channels of its pairs, and q kᵀ the sum of two products: the order
of channels does not matter to it. Elements moved beside those of the packed kernel: a program reads D of the table per
key, in fp32, from the L2 cache, and BLOCK_M · N of a bias.
"""

import math
from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._attention_kernel import head_block
from vtk_kernels._device import capability, chained, follow, is_hopper
from vtk_kernels._dispatch import on_device
from vtk_kernels._heads import Heads
from vtk_kernels._heads_kernel import halves, prepare
from vtk_kernels._matmul import aligned
from vtk_kernels._rows import as_rows, contiguous
from vtk_kernels._triton import tl, triton


@triton.jit(do_not_specialize=["T", "N", "segments", "tiles", "queries"])  # they differ from batch to batch
@no_type_check
def _rotary_attention_kernel(
    o_ptr,  # out (T, H·D), or (segments · queries, H·D)
    qkv_ptr,  # (T, (H + 2·Hkv)·D): q of all heads, k, v
    row_scale_ptr,  # (T,), fp32; or None
    bias_ptr,  # ((H + 2·Hkv)·D,), or None
    bounds_ptr,  # (segments + 1,), int32: 0 and the end row of each segment; or None: N rows each
    rope_ptr,  # (R, D) or (H, R, D), fp32: cos, sin; or None
    rope_row_ptr,  # (T,), int32; or None
    q_weight_ptr,  # (H, D) or (S, H, D); or None
    q_shift_ptr,
    k_weight_ptr,  # (Hkv, D) or (S, Hkv, D); or None
    k_shift_ptr,
    slot_ptr,  # (segments,), int32: which of S; or None
    logit_bias_ptr,  # (H, M, M), or None
    stride_t,  # from a row of qkv to the next
    stride_rope,  # from the table of a head to the next, 0 for one of all
    stride_bh,  # of the logits' bias: from a head to the next
    stride_bm,  # from a query to the next
    T,
    N,
    H,
    KV,  # Hkv
    segments,
    tiles,  # programs for the queries of one head of one segment
    queries,  # first tokens of a segment that ask
    scale,  # of the logits, times log2 e
    eps,
    FIRST: tl.constexpr,  # only the first tokens of a segment ask, and it has so many rows of o
    NORM: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    LOG2E: tl.constexpr = 1.4426950408889634
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % H
    kv_head = head // (H // KV)
    segment = (tl.program_id(0) // tiles // H).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    inside = channel < D
    if bounds_ptr is None:
        first = segment * N
        length = N
    else:
        first = tl.load(bounds_ptr + segment).to(tl.int64)
        if segment == segments:  # the rows that belong to no segment
            blank = tl.zeros([BLOCK_M, BLOCK_D], o_ptr.dtype.element_ty)
            for start in range(first + tile * BLOCK_M, T, tiles * BLOCK_M):
                at = start + tl.arange(0, BLOCK_M)
                o_tile_ptr = o_ptr + ((at * H + head) * D)[:, None] + channel[None, :]
                tl.store(o_tile_ptr, blank, mask=(at < T)[:, None] & inside[None, :])
            return
        length = (tl.load(bounds_ptr + segment + 1) - first).to(tl.int32)
    if FIRST:
        count = queries
        out = segment * queries
    else:
        count = length
        out = first
    if tile * BLOCK_M >= count:
        return

    k_at = (H + kv_head) * D  # columns of qkv
    v_at = (H + KV + kv_head) * D
    segment_ptr = qkv_ptr + first * stride_t
    scale_ptr = None if row_scale_ptr is None else row_scale_ptr + first
    turn_ptr = None if rope_ptr is None else rope_ptr + head.to(tl.int64) * stride_rope
    turn_row_ptr = None if rope_row_ptr is None else rope_row_ptr + first
    slot = tl.zeros([], tl.int32) if slot_ptr is None else tl.load(slot_ptr + segment)
    q_norm = (slot * H + head) * D
    k_norm = (slot * KV + kv_head) * D

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    asks = row < length
    q_a, q_b = halves(segment_ptr + head * D, row, asks, stride_t, D, HALF, BLOCK_H)
    q_a, q_b = prepare(
        q_a, q_b, scale_ptr, None if bias_ptr is None else bias_ptr + head * D,
        None if q_weight_ptr is None else q_weight_ptr + q_norm, None if q_shift_ptr is None else q_shift_ptr + q_norm,
        turn_ptr, turn_row_ptr, row, asks, eps, NORM, D, HALF, BLOCK_H,
    )  # fmt: skip

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, length, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        there = key < length
        k_a, k_b = halves(segment_ptr + k_at, key, there, stride_t, D, HALF, BLOCK_H)
        v_ptr = segment_ptr + v_at + (key.to(tl.int64) * stride_t)[:, None] + channel[None, :]
        v = tl.load(v_ptr, mask=there[:, None] & inside[None, :], other=0.0)
        k_a, k_b = prepare(
            k_a, k_b, scale_ptr, None if bias_ptr is None else bias_ptr + k_at,
            None if k_weight_ptr is None else k_weight_ptr + k_norm,
            None if k_shift_ptr is None else k_shift_ptr + k_norm,
            turn_ptr, turn_row_ptr, key, there, eps, NORM, D, HALF, BLOCK_H,
        )  # fmt: skip
        z = tl.dot(q_a, k_a.T, input_precision="ieee")
        z = tl.dot(q_b, k_b.T, z, input_precision="ieee") * scale
        if logit_bias_ptr is not None:
            at_ptr = logit_bias_ptr + head.to(tl.int64) * stride_bh + (row * stride_bm)[:, None] + key[None, :]
            z += tl.load(at_ptr, mask=asks[:, None] & there[None, :], other=0.0).to(tl.float32) * LOG2E
        z = tl.where(there[None, :], z, float("-inf"))
        higher = tl.maximum(top, tl.max(z, 1))
        if logit_bias_ptr is not None:  # which may be −inf for all keys so far: −inf − −inf is no number
            base = tl.where(higher == float("-inf"), 0.0, higher)
        else:
            base = higher
        p = tl.exp2(z - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        if row_scale_ptr is not None:
            p *= tl.load(scale_ptr + key, mask=there, other=0.0).to(tl.float32)[None, :]
        o = tl.dot(p.to(v.dtype), v, o * shrink[:, None], input_precision="ieee")
        top = higher
    o = o / tl.maximum(total, 1.0)[:, None]  # the largest term is 1, so only where there is no key is total less
    if bias_ptr is not None:
        o += tl.load(bias_ptr + v_at + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    o = tl.where(asks[:, None], o, 0.0)  # queries that the segment is too short for
    o_tile_ptr = o_ptr + (((out + row) * H + head) * D)[:, None] + channel[None, :]
    tl.store(o_tile_ptr, o.to(o_ptr.dtype.element_ty), mask=(row < count)[:, None] & inside[None, :])


def _config(queries: int, head_dim: int, extra: bool, pairs: bool, packed: Tensor) -> tuple[int, int, int, int]:
    """Return (BLOCK_M, BLOCK_N, num_warps, num_stages): keys pass through registers, which a third stage would need.

    Norms or a bias, both ``extra``, beside 64 keys are more than a thread's registers on all cards but `is_hopper`. So
    is, before Hopper and by Triton 3.6, a rotation of neighbouring channels, ``pairs``.
    """
    half = packed.element_size() == 2
    block_m = min(max(triton.next_power_of_2(queries), 16), 64 if half else 32)
    if not half:
        return block_m, 32, 4, 2
    if not aligned(packed) or head_dim % 16 or head_block(head_dim) > 64:
        return block_m, 32, 8, 2
    few = (extra and not is_hopper(packed)) or (pairs and capability(packed) < 9)
    return block_m, 32 if few else 64, 4, 2


def output_shape(qkv: Tensor, heads: Heads, cu_seqlens: Tensor | None, num_queries: int | None) -> tuple[int, ...]:
    """Return the shape of the output."""
    width = qkv.shape[-1] // heads.parts * heads.num_heads
    if num_queries is None:
        return (*qkv.shape[:-1], width)
    return (qkv.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, num_queries, width)


def launch(
    qkv: Tensor,
    heads: Heads,
    cu_seqlens: Tensor | None = None,
    num_queries: int | None = None,
    scale: float = 1.0,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Start the kernel; arguments and result as of `packed_attention`.

    Raises:
        ValueError: no ``max_seqlen`` beside ``cu_seqlens`` on CUDA, or a table or bias with too few rows for it.
    """
    if cu_seqlens is not None and max_seqlen is None and qkv.is_cuda:
        raise ValueError("`max_seqlen` is needed with `cu_seqlens` on CUDA: an int that no segment's length exceeds")
    o = torch.empty(output_shape(qkv, heads, cu_seqlens, num_queries), dtype=qkv.dtype, device=qkv.device)
    packed = as_rows(qkv)
    rows, head_dim = packed.shape[0], packed.shape[1] // heads.parts
    if cu_seqlens is None:
        segments, longest = qkv.shape[0], qkv.shape[1]
    else:
        segments, longest = cu_seqlens.numel() - 1, rows if max_seqlen is None else max_seqlen
    queries = longest if num_queries is None else num_queries
    pairs = heads.rope is not None and not heads.rotate_half
    extra = heads.qk_norm is not None or heads.attn_bias is not None
    block_m, block_n, warps, stages = _config(queries, head_dim, extra, pairs, packed)
    tiles = max(triton.cdiv(queries, block_m), 1)
    outside = cu_seqlens is not None and num_queries is None  # rows after the last segment become zero
    programs = tiles * heads.num_heads * (segments + outside)
    rope, norm, logit_bias = contiguous(heads.rope), heads.qk_norm, heads.attn_bias
    if logit_bias is not None and logit_bias.stride(2) != 1:
        logit_bias = logit_bias.contiguous()
    if o.numel():
        with on_device(qkv):
            _rotary_attention_kernel[(programs,)](
                o,
                packed,
                contiguous(row_scale),
                contiguous(bias),
                contiguous(cu_seqlens),
                rope,
                contiguous(heads.rope_row),
                *((None,) * 5 if norm is None else (contiguous(t) for t in norm[2:])),
                logit_bias,
                packed.stride(0),
                0 if rope is None or rope.ndim == 2 else rope.stride(0),
                0 if logit_bias is None else logit_bias.stride(0),
                0 if logit_bias is None else logit_bias.stride(1),
                rows,
                longest,
                heads.num_heads,
                heads.num_kv_heads,
                segments,
                tiles,
                queries,
                scale * math.log2(math.e),
                0.0 if norm is None else norm.eps,
                FIRST=num_queries is not None,
                NORM=None if norm is None else norm.kind,
                D=head_dim,
                HALF=rope is None or heads.rotate_half,
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                BLOCK_D=head_block(head_dim),
                BLOCK_H=head_block((head_dim + 1) // 2),
                num_warps=warps,
                num_stages=stages,
                **chained(qkv, programs),
            )
    return o
