"""Kernel of `packed_attention` and its launch settings."""

import math
from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._device import chained, follow
from vtk_kernels._dispatch import on_device
from vtk_kernels._matmul import aligned
from vtk_kernels._rows import as_rows, contiguous
from vtk_kernels._triton import tl, triton


@triton.jit(do_not_specialize=["T", "N", "segments", "tiles"])  # they differ from batch to batch
@no_type_check
def _packed_attention_kernel(
    o_ptr,  # out (T, H·D), or (segments · queries, H·D)
    qkv_ptr,  # (T, 3·H·D): q of all heads, k, v
    row_scale_ptr,  # (T,), fp32; or None
    bias_ptr,  # (3·H·D,), or None
    bounds_ptr,  # (segments + 1,), int32: 0 and the end row of each segment; or None: N rows each
    stride_t,  # from a row of qkv to the next
    T,
    N,
    H,
    segments,
    tiles,  # programs for the queries of one head of one segment
    queries,  # first tokens of a segment that ask, or None: all
    scale,  # of the logits, times log2 e
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % H
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
    if queries is None:
        count = length
        out = first
    else:
        count = queries
        out = segment * queries
    if tile * BLOCK_M >= count:
        return

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    head_ptr = qkv_ptr + first * stride_t + head * D
    q_ptr = head_ptr + (row.to(tl.int64) * stride_t)[:, None] + channel[None, :]
    q = tl.load(q_ptr, mask=(row < length)[:, None] & inside[None, :], other=0.0)
    if row_scale_ptr is not None or bias_ptr is not None:
        wide = q.to(tl.float32)
        if row_scale_ptr is not None:
            wide *= tl.load(row_scale_ptr + first + row, mask=row < length, other=0.0).to(tl.float32)[:, None]
        if bias_ptr is not None:
            wide += tl.load(bias_ptr + head * D + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
        q = wide.to(q.dtype)

    key = tl.arange(0, BLOCK_N)
    k_ptr = head_ptr + H * D + (key.to(tl.int64) * stride_t)[None, :] + channel[:, None]
    v_ptr = head_ptr + 2 * H * D + (key.to(tl.int64) * stride_t)[:, None] + channel[None, :]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, length, BLOCK_N):
        there = start + key < length
        k = tl.load(k_ptr, mask=there[None, :] & inside[:, None], other=0.0)
        v = tl.load(v_ptr, mask=there[:, None] & inside[None, :], other=0.0)
        z = tl.dot(q, k, input_precision="ieee") * scale
        if row_scale_ptr is not None:
            key_scale = tl.load(row_scale_ptr + first + start + key, mask=there, other=0.0).to(tl.float32)
            z *= key_scale[None, :]
        z = tl.where(there[None, :], z, float("-inf"))
        higher = tl.maximum(top, tl.max(z, 1))
        p = tl.exp2(z - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        if row_scale_ptr is not None:
            p *= key_scale[None, :]
        o = tl.dot(p.to(v.dtype), v, o * shrink[:, None], input_precision="ieee")
        top = higher
        k_ptr += BLOCK_N * stride_t
        v_ptr += BLOCK_N * stride_t
    o = o / tl.maximum(total, 1.0)[:, None]  # the largest term is 1, so only where there is no key is total less
    if bias_ptr is not None:
        o += tl.load(bias_ptr + (2 * H + head) * D + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    o = tl.where((row < length)[:, None], o, 0.0)  # queries that the segment is too short for
    o_tile_ptr = o_ptr + (((out + row) * H + head) * D)[:, None] + channel[None, :]
    tl.store(o_tile_ptr, o.to(o_ptr.dtype.element_ty), mask=(row < count)[:, None] & inside[None, :])


def _config(queries: int, head_dim: int, folded: bool, packed: Tensor) -> tuple[int, int, int, int]:
    """Return (BLOCK_M, BLOCK_N, num_warps, num_stages).

    Three stages of 64 keys were the quickest form on an H200 from 1 to 64 images of 197 tokens. A row scale, wide
    heads, rows that are not `aligned` and fp32 leave too few registers for that.
    """
    half = packed.element_size() == 2
    block_m = min(max(triton.next_power_of_2(queries), 16), 64 if half else 32)
    if not aligned(packed) or head_dim % 8:
        return block_m, 32, 8, 2
    if half and head_block(head_dim) <= 64:
        return block_m, 64, 4, 2 if folded else 3
    return block_m, 32, 4, 2


def head_options(head_dim: int, block_m: int, block_n: int, warps: int, stages: int) -> dict[str, int]:
    """Return the options of an attention's launch that follow from its blocks."""
    blocks = {"D": head_dim, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": head_block(head_dim)}
    return {**blocks, "num_warps": warps, "num_stages": stages}


def head_block(head_dim: int) -> int:
    """Return BLOCK_D: the channels of a head, rounded up to what matrix units multiply."""
    return max(triton.next_power_of_2(head_dim), 16)


def output_shape(qkv: Tensor, cu_seqlens: Tensor | None, num_queries: int | None) -> tuple[int, ...]:
    """Return the shape of the output of `packed_attention`."""
    width = qkv.shape[-1] // 3
    if num_queries is None:
        return (*qkv.shape[:-1], width)
    return (qkv.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, num_queries, width)


def launch(
    qkv: Tensor,
    num_heads: int,
    cu_seqlens: Tensor | None = None,
    num_queries: int | None = None,
    scale: float = 1.0,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Start the kernel; arguments and result as of `packed_attention`.

    Raises:
        ValueError: no ``max_seqlen`` beside ``cu_seqlens`` on CUDA.
    """
    if cu_seqlens is not None and max_seqlen is None and qkv.is_cuda:
        raise ValueError("`max_seqlen` is needed with `cu_seqlens` on CUDA: an int that no segment's length exceeds")
    o = torch.empty(output_shape(qkv, cu_seqlens, num_queries), dtype=qkv.dtype, device=qkv.device)
    packed = as_rows(qkv)
    rows, head_dim = packed.shape[0], packed.shape[1] // (3 * num_heads)
    if cu_seqlens is None:
        segments, longest = qkv.shape[0], qkv.shape[1]
    else:
        segments, longest = cu_seqlens.numel() - 1, rows if max_seqlen is None else max_seqlen
    queries = longest if num_queries is None else num_queries
    block_m, block_n, warps, stages = _config(queries, head_dim, row_scale is not None, packed)
    tiles = max(triton.cdiv(queries, block_m), 1)
    outside = cu_seqlens is not None and num_queries is None  # rows after the last segment become zero
    programs = tiles * num_heads * (segments + outside)
    if o.numel():
        with on_device(qkv):
            _packed_attention_kernel[(programs,)](
                o,
                packed,
                contiguous(row_scale),
                contiguous(bias),
                contiguous(cu_seqlens),
                packed.stride(0),
                rows,
                longest,
                num_heads,
                segments,
                tiles,
                num_queries,
                scale * math.log2(math.e),
                **head_options(head_dim, block_m, block_n, warps, stages),
                **chained(qkv, programs),
            )
    return o
