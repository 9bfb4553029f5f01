"""Attention over few keys: the logits of all of them at once in registers, one softmax and no rescaling.

The keys of an image are whole blocks of 64 and a tail, the smallest power of two from 16 that holds the rest (197 keys
are 3 · 64 + 16, where steps of 64 are 256), and only the tail is masked. The largest logit is known before the first
power is taken: nothing computed before is ever scaled again. On Hopper and later all keys and values are loaded before
the first product, so that a program waits for memory once. Counted, not measured: 1,220 instructions a warp for 197
keys on sm_90, 2,391 in the kernel with steps; 1,752 and 2,955 in the LN-folded form.
"""

import math
from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._attention_kernel import head_options
from vtk_kernels._device import capability, chained, follow, is_hopper
from vtk_kernels._dispatch import on_device
from vtk_kernels._matmul import aligned
from vtk_kernels._rows import as_rows, contiguous
from vtk_kernels._triton import tl, triton

_BLOCK = 64

_MOST = {8: (224, 208), 9: (288, 288), 10: (288, 208)}
"""Generation of cards to the most keys without spilled registers, plain and LN-folded (Triton 3.6 and 3.8)."""

_MAX_HEAD_DIM = 64
"""With 128 channels the keys and values of 197 tokens take half of a multiprocessor's shared memory."""


@triton.jit
@no_type_check
def _keys(i: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, TAIL: tl.constexpr):
    """Return the keys of piece ``i``: a whole block, or the tail."""
    if i < BLOCKS:
        return i * BLOCK_N + tl.arange(0, BLOCK_N)
    else:
        return BLOCKS * BLOCK_N + tl.arange(0, TAIL)


@triton.jit
@no_type_check
def _tile(ptr, row, stride_t, N, WHOLE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows as (rows, BLOCK_D); those from N on are 0, of which there are none in what is WHOLE."""
    channel = tl.arange(0, BLOCK_D)
    at = ptr + (row * stride_t)[:, None] + channel[None, :]
    if WHOLE:
        if D == BLOCK_D:
            return tl.load(at)
        else:
            return tl.load(at, mask=(channel < D)[None, :], other=0.0)
    else:
        return tl.load(at, mask=(row < N)[:, None] & (channel < D)[None, :], other=0.0)


@triton.jit
@no_type_check
def _scale_of(ptr, key, N, WHOLE: tl.constexpr, EVICTION: tl.constexpr):
    """Load the scales of keys; what is read again under another policy is not kept in registers in between."""
    if WHOLE:
        return tl.load(ptr + key, eviction_policy=EVICTION).to(tl.float32)
    else:
        return tl.load(ptr + key, mask=key < N, other=0.0, eviction_policy=EVICTION).to(tl.float32)


@triton.jit(do_not_specialize=["N", "tiles", "queries"])  # they differ from model to model, the code does not
@no_type_check
def _short_attention_kernel(
    o_ptr,  # out (B · queries, H·D)
    qkv_ptr,  # (B · N, 3·H·D): q of all heads, k, v
    row_scale_ptr,  # (B · N,), fp32; or None
    bias_ptr,  # (3·H·D,), or None
    stride_t,  # from a row of qkv to the next
    N,
    H,
    tiles,  # programs for the queries of one head of one image
    queries,  # first tokens of an image that ask
    scale,  # of the logits, times log2 e; positive
    BLOCKS: tl.constexpr,  # whole blocks of keys
    TAIL: tl.constexpr,  # keys of the last block, of which the first are there; 0 for none
    EARLY: tl.constexpr,  # load all keys and values before the first product
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    PIECES: tl.constexpr = BLOCKS + (TAIL > 0)
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % H
    image = (tl.program_id(0) // tiles // H).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    inside = channel < D
    q_ptr = qkv_ptr + image * N * stride_t + head * D
    k_ptr = q_ptr + H * D
    v_ptr = k_ptr + H * D
    scale_ptr = None if row_scale_ptr is None else row_scale_ptr + image * N

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    own = tl.minimum(row, N - 1)  # past the end the last row stands in, and is not stored: no mask
    q = _tile(q_ptr, own, stride_t, N, True, D, BLOCK_D)
    if row_scale_ptr is not None or bias_ptr is not None:
        wide = q.to(tl.float32)
        if row_scale_ptr is not None:
            wide *= tl.load(scale_ptr + own).to(tl.float32)[:, None]
        if bias_ptr is not None:
            wide += tl.load(bias_ptr + head * D + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
        q = tl.sum(wide[:, None, :], 1).to(q.dtype)  # of one term: or the compiler would rebuild q for every product

    k, v = (), ()
    for i in tl.static_range(PIECES if EARLY else 0):
        k += (_tile(k_ptr, _keys(i, BLOCKS, BLOCK_N, TAIL), stride_t, N, i < BLOCKS, D, BLOCK_D),)
    for i in tl.static_range(PIECES if EARLY else 0):
        v += (_tile(v_ptr, _keys(i, BLOCKS, BLOCK_N, TAIL), stride_t, N, i < BLOCKS, D, BLOCK_D),)

    z = ()
    for i in tl.static_range(PIECES):
        key = _keys(i, BLOCKS, BLOCK_N, TAIL)
        k_tile = k[i] if EARLY else _tile(k_ptr, key, stride_t, N, i < BLOCKS, D, BLOCK_D)
        logits = tl.dot(q, k_tile.T, input_precision="ieee")
        if row_scale_ptr is not None:
            logits *= _scale_of(scale_ptr, key, N, i < BLOCKS, "")[None, :]
        if i == BLOCKS:
            logits = tl.where((key < N)[None, :], logits, float("-inf"))
        z += (logits,)
    top = tl.max(z[0], 1)
    for i in tl.static_range(1, PIECES):
        top = tl.maximum(top, tl.max(z[i], 1))
    top *= scale  # its rounding is a factor of all terms alike, and of their sum

    total = tl.zeros([BLOCK_M], tl.float32)
    weights = ()  # before the products: in half precision they leave registers for the sums
    for i in tl.static_range(PIECES):
        p = tl.exp2(z[i] * scale - top[:, None])
        total += tl.sum(p, 1)
        if row_scale_ptr is not None:
            p *= _scale_of(scale_ptr, _keys(i, BLOCKS, BLOCK_N, TAIL), N, i < BLOCKS, "evict_last")[None, :]
        weights += (p.to(q.dtype),)
    o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in tl.static_range(PIECES):
        key = _keys(i, BLOCKS, BLOCK_N, TAIL)
        v_tile = v[i] if EARLY else _tile(v_ptr, key, stride_t, N, i < BLOCKS, D, BLOCK_D)
        o = tl.dot(weights[i], v_tile, o, input_precision="ieee")
    o *= (1.0 / total)[:, None]
    if bias_ptr is not None:
        o += tl.load(bias_ptr + (2 * H + head) * D + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    o_tile_ptr = o_ptr + (((image * queries + row) * H + head) * D)[:, None] + channel[None, :]
    tl.store(o_tile_ptr, o.to(o_ptr.dtype.element_ty), mask=(row < queries)[:, None] & inside[None, :])


def fits(qkv: Tensor, num_heads: int, scale: float, folded: bool) -> bool:
    """Return whether the kernel takes a batch of equal lengths.

    Args:
        qkv: (B, N, 3·H·D).
        num_heads: H.
        scale: of the logits.
        folded: there is a row scale.
    """
    keys, head_dim = qkv.shape[1], qkv.shape[2] // (3 * num_heads)
    generation = min(capability(qkv) or 9, max(_MOST))  # the interpreter has no registers to spill
    most = _MOST.get(generation, (0, 0))[folded]
    if not 1 <= keys <= most or head_dim > _MAX_HEAD_DIM or head_dim % 8 or not scale > 0:
        return False
    rows = as_rows(qkv)
    half = qkv.element_size() == 2 or not qkv.is_cuda  # a card multiplies fp32 without its matrix units
    return half and aligned(rows) and keys * rows.stride(0) < 2**31


def cut(keys: int) -> tuple[int, int]:
    """Return the whole blocks that so many keys make, and the size of the tail: 0, 16, 32 or 64."""
    blocks, left = divmod(keys, _BLOCK)
    return blocks, max(triton.next_power_of_2(left), 16) if left else 0


def short_attention(
    qkv: Tensor,
    num_heads: int,
    num_queries: int | None = None,
    scale: float = 1.0,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Start the kernel on what `fits`; arguments and result as of `packed_attention`."""
    packed = as_rows(qkv)
    head_dim = packed.shape[1] // (3 * num_heads)
    images, keys = qkv.shape[:2]
    queries = keys if num_queries is None else num_queries
    o = torch.empty((images, queries, num_heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    block_m = min(max(triton.next_power_of_2(queries), 16), 64)
    tiles = triton.cdiv(queries, block_m)
    programs = tiles * num_heads * images
    blocks, tail = cut(keys)
    if o.numel():
        with on_device(qkv):
            _short_attention_kernel[(programs,)](
                o,
                packed,
                contiguous(row_scale),
                contiguous(bias),
                packed.stride(0),
                keys,
                num_heads,
                tiles,
                queries,
                scale * math.log2(math.e),
                BLOCKS=blocks,
                TAIL=tail,
                EARLY=is_hopper(qkv),
                **head_options(head_dim, block_m, _BLOCK, 4, 1),
                **chained(qkv, programs),
            )
    return o
