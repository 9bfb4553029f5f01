"""Preparation of heads in kernels: in attention's own load, or by a kernel ahead of SDPA (see `vtk_kernels._heads`).

Preparation works on pairs of channels, so a head's tile is loaded as two halves: the pairs' first and second channels.
Elements moved ahead of SDPA: reads q and k and writes them, in the LN-folded form v too; D of the table per row.
"""

from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._attention_kernel import head_block
from vtk_kernels._device import chained, follow
from vtk_kernels._dispatch import on_device
from vtk_kernels._heads import Heads
from vtk_kernels._rows import as_rows, contiguous
from vtk_kernels._triton import tl, triton


@triton.jit
@no_type_check
def halves(ptr, row, mask, stride_t, D: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr):
    """Load a head's rows as two tiles (rows, BLOCK_H): channels i and i + D/2 if HALF, else 2i and 2i + 1."""
    if HALF:
        a_at = tl.arange(0, BLOCK_H)
        b_at = a_at + (D + 1) // 2
        at = ptr + (row.to(tl.int64) * stride_t)[:, None]
        a = tl.load(at + a_at[None, :], mask=mask[:, None] & (a_at < (D + 1) // 2)[None, :], other=0.0)
        b = tl.load(at + b_at[None, :], mask=mask[:, None] & (b_at < D)[None, :], other=0.0)
        return a, b
    else:
        channel = tl.arange(0, 2 * BLOCK_H)
        at = ptr + (row.to(tl.int64) * stride_t)[:, None] + channel[None, :]
        both = tl.load(at, mask=mask[:, None] & (channel < D)[None, :], other=0.0)
        return tl.split(tl.reshape(both, (row.shape[0], BLOCK_H, 2)))


@triton.jit
@no_type_check
def _channels(D: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return the channels of both tiles of `halves`, and which of them there are."""
    i = tl.arange(0, BLOCK_H)
    if HALF:
        return i, i + (D + 1) // 2, i < (D + 1) // 2, i + (D + 1) // 2 < D
    else:
        return 2 * i, 2 * i + 1, 2 * i < D, 2 * i + 1 < D


@triton.jit
@no_type_check
def prepare(
    a,  # (rows, BLOCK_H): one tile of `halves`
    b,
    row_scale_ptr,  # of the first row, or None
    bias_ptr,  # (D,), or None
    weight_ptr,  # (D,) of the head's norm, or None
    shift_ptr,  # (D,), or None
    rope_ptr,  # table (R, D), or None
    rope_row_ptr,  # of the first row, or None: row r reads row r
    row,
    mask,
    eps,
    NORM: tl.constexpr,  # "layer", "rms" or None
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Return the tiles unfolded, normalised and rotated, in their own type."""
    first, second, a_there, b_there = _channels(D, HALF, BLOCK_H)
    u = a.to(tl.float32)
    v = b.to(tl.float32)
    if row_scale_ptr is not None:
        factor = tl.load(row_scale_ptr + row, mask=mask, other=0.0).to(tl.float32)[:, None]
        u *= factor
        v *= factor
    if bias_ptr is not None:
        u += tl.load(bias_ptr + first, mask=a_there, other=0.0).to(tl.float32)[None, :]
        v += tl.load(bias_ptr + second, mask=b_there, other=0.0).to(tl.float32)[None, :]
    if NORM is not None:
        if NORM == "layer":
            mean = ((tl.sum(u, 1) + tl.sum(v, 1)) / D)[:, None]
            u = tl.where(a_there[None, :], u - mean, 0.0)
            v = tl.where(b_there[None, :], v - mean, 0.0)
        rstd = tl.rsqrt((tl.sum(u * u, 1) + tl.sum(v * v, 1)) / D + eps)[:, None]
        u *= rstd
        v *= rstd
        if weight_ptr is not None:
            u *= tl.load(weight_ptr + first, mask=a_there, other=0.0).to(tl.float32)[None, :]
            v *= tl.load(weight_ptr + second, mask=b_there, other=0.0).to(tl.float32)[None, :]
        if shift_ptr is not None:
            u += tl.load(shift_ptr + first, mask=a_there, other=0.0).to(tl.float32)[None, :]
            v += tl.load(shift_ptr + second, mask=b_there, other=0.0).to(tl.float32)[None, :]
    if rope_ptr is not None:
        angle = tl.arange(0, BLOCK_H)
        at = row if rope_row_ptr is None else tl.load(rope_row_ptr + row, mask=mask, other=0)
        at_ptr = rope_ptr + (at.to(tl.int64) * D)[:, None] + angle[None, :]
        there = mask[:, None] & (angle < D // 2)[None, :]
        cos = tl.load(at_ptr, mask=there, other=0.0)
        sin = tl.load(at_ptr + D // 2, mask=there, other=0.0)
        u, v = u * cos - v * sin, v * cos + u * sin
    return u.to(a.dtype), v.to(b.dtype)


@triton.jit(do_not_specialize=["N", "tiles"])  # they differ from model to model, the code does not
@no_type_check
def _prepare_heads_kernel(
    o_ptr,  # out (B · N, PARTS·D)
    qkv_ptr,  # (B · N, (H + 2·Hkv)·D): q of all heads, k, v
    row_scale_ptr,  # (B · N,), fp32; or None
    bias_ptr,  # ((H + 2·Hkv)·D,), or None
    rope_ptr,  # (R, D) or (H, R, D), fp32: cos, sin; or None
    rope_row_ptr,  # (B · N,), int32; or None
    q_weight_ptr,  # (H, D) or (S, H, D); or None
    q_shift_ptr,
    k_weight_ptr,  # (Hkv, D) or (S, Hkv, D); or None
    k_shift_ptr,
    slot_ptr,  # (B,), int32: which of S; or None
    stride_t,  # from a row of qkv to the next
    stride_rope,  # from the table of a head to the next, 0 for one of all
    N,
    H,
    KV,  # Hkv
    parts,  # heads of o: H + Hkv, or with the values H + 2·Hkv
    tiles,  # programs for one head of one image
    eps,
    NORM: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    part = tl.program_id(0) % parts  # heads of one row are neighbours in memory
    tile = tl.program_id(0) // parts % tiles
    image = (tl.program_id(0) // parts // tiles).to(tl.int64)
    first = image * N
    row = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = row < N
    scale_ptr = None if row_scale_ptr is None else row_scale_ptr + first
    shift_ptr = None if bias_ptr is None else bias_ptr + part * D
    turn_row_ptr = None if rope_row_ptr is None else rope_row_ptr + first
    slot = tl.zeros([], tl.int32) if slot_ptr is None else tl.load(slot_ptr + image)
    a, b = halves(qkv_ptr + first * stride_t + part * D, row, mask, stride_t, D, HALF, BLOCK_H)
    if part < H:
        turn_ptr = None if rope_ptr is None else rope_ptr + part.to(tl.int64) * stride_rope
        at = (slot * H + part) * D
        a, b = prepare(
            a, b, scale_ptr, shift_ptr, None if q_weight_ptr is None else q_weight_ptr + at,
            None if q_shift_ptr is None else q_shift_ptr + at, turn_ptr, turn_row_ptr, row, mask, eps,
            NORM, D, HALF, BLOCK_H,
        )  # fmt: skip
    elif part < H + KV:
        turn_ptr = None if rope_ptr is None else rope_ptr + (part - H).to(tl.int64) * stride_rope
        at = (slot * KV + part - H) * D
        a, b = prepare(
            a, b, scale_ptr, shift_ptr, None if k_weight_ptr is None else k_weight_ptr + at,
            None if k_shift_ptr is None else k_shift_ptr + at, turn_ptr, turn_row_ptr, row, mask, eps,
            NORM, D, HALF, BLOCK_H,
        )  # fmt: skip
    else:
        a, b = prepare(
            a, b, scale_ptr, shift_ptr, None, None, None, None, row, mask, eps, None, D, HALF, BLOCK_H
        )  # fmt: skip
    at_ptr = o_ptr + (((first + row) * parts + part) * D)[:, None]
    if HALF:
        i = tl.arange(0, BLOCK_H)
        tl.store(at_ptr + i[None, :], a, mask=mask[:, None] & (i < (D + 1) // 2)[None, :])
        j = i + (D + 1) // 2
        tl.store(at_ptr + j[None, :], b, mask=mask[:, None] & (j < D)[None, :])
    else:
        channel = tl.arange(0, 2 * BLOCK_H)
        both = tl.reshape(tl.join(a, b), (BLOCK_T, 2 * BLOCK_H))
        tl.store(at_ptr + channel[None, :], both, mask=mask[:, None] & (channel < D)[None, :])


def prepared(qkv: Tensor, heads: Heads, row_scale: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Start the kernel: (B, N, H + Hkv, D), and the values behind them, (B, N, H + 2·Hkv, D), in the folded form.

    Args:
        qkv: (B, N, (H + 2·Hkv)·D).
        heads: norms and table.
        row_scale: as of `packed_attention`.
        bias: as there.
    """
    packed = as_rows(qkv)
    images, tokens = qkv.shape[:2]
    head_dim = packed.shape[1] // heads.parts
    parts = heads.parts - (heads.num_kv_heads if row_scale is None and bias is None else 0)
    o = torch.empty((images, tokens, parts, head_dim), dtype=qkv.dtype, device=qkv.device)
    block_h = head_block((head_dim + 1) // 2)
    block_t = 2048 // block_h
    tiles = triton.cdiv(tokens, block_t)
    programs = tiles * parts * images
    rope, norm = contiguous(heads.rope), heads.qk_norm
    if o.numel():
        with on_device(qkv):
            _prepare_heads_kernel[(programs,)](
                o,
                packed,
                contiguous(row_scale),
                contiguous(bias),
                rope,
                contiguous(heads.rope_row),
                *((None,) * 5 if norm is None else (contiguous(t) for t in norm[2:])),
                packed.stride(0),
                0 if rope is None or rope.ndim == 2 else rope.stride(0),
                tokens,
                heads.num_heads,
                heads.num_kv_heads,
                parts,
                tiles,
                0.0 if norm is None else norm.eps,
                NORM=None if norm is None else norm.kind,
                D=head_dim,
                HALF=rope is None or heads.rotate_half,
                BLOCK_T=block_t,
                BLOCK_H=block_h,
                num_warps=4,
                num_stages=1,
                **chained(qkv, programs),
            )
    return o
