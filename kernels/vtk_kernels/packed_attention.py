"""Attention over one packed matrix of queries, keys and values, for whole batches and for segments of any length.

    z = scale · q kᵀ,    o = softmax(z) v    per head and image (or segment)

The heads of P parallel branches are P·H heads here: one launch, and P times the programs where a batch is small. One
program owns BLOCK_M queries of one head. It reads keys and values in steps of BLOCK_N with the running softmax of
Milakov, Gimelshein (2018) and Dao et al. (2022); powers are of 2, log2 e being part of the scale. Elements moved: per
head reads q once and k, v once per BLOCK_M queries (cached), writes o.

LN-folded form: q, k, v are row_scale · raw + bias. Softmax over keys does not see what is equal for all of them, so
the keys' bias drops out, their scale multiplies columns of q kᵀ, the values' scale the probabilities, and the values'
bias is added to o: only q is rebuilt.

Heads may be prepared on their way in: norms of queries and keys, rotary embedding, fewer heads of keys and values, an
additive bias of the logits (see `vtk_kernels._heads`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk_kernels._attention_backward import packed_attention_backward
from vtk_kernels._attention_kernel import launch, output_shape
from vtk_kernels._attention_reference import reference
from vtk_kernels._dispatch import LAUNCHES, opaque, route, runs_kernel
from vtk_kernels._heads import HeadNorms, Heads, check_heads
from vtk_kernels._matmul import check_row_scale
from vtk_kernels._rotary_attention import launch as launch_rotary
from vtk_kernels._rotary_operator import fastest, flat
from vtk_kernels._rows import check_channels
from vtk_kernels._segments import check_segments
from vtk_kernels._short_attention import fits, short_attention
from vtk_kernels.choices import choose, device_name

__all__ = ["HeadNorms", "packed_attention", "packed_attention_ref"]

LAUNCHES["packed_attention"] = 1

MAX_HEAD_DIM = 128


def packed_attention_ref(
    qkv: Tensor,
    num_heads: int,
    cu_seqlens: Tensor | None = None,
    num_queries: int | None = None,
    scale: float = 1.0,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    max_seqlen: int | None = None,
    *,
    num_kv_heads: int | None = None,
    rope: Tensor | None = None,
    rotate_half: bool = False,
    rope_row: Tensor | None = None,
    qk_norm: HeadNorms | None = None,
    attn_bias: Tensor | None = None,
) -> Tensor:
    """Compute `packed_attention` by torch, segments by one SDPA per run of equal lengths. Same arguments and result.

    Raises:
        ValueError: ``cu_seqlens`` does not ascend from 0 to at most T, or a segment is longer than ``max_seqlen``.
    """
    kv = num_heads if num_kv_heads is None else num_kv_heads
    heads = Heads(num_heads, kv, rope, rotate_half, rope_row, qk_norm, attn_bias)
    return reference(qkv, heads, cu_seqlens, num_queries, scale, row_scale, bias, max_seqlen)


def _attend(qkv: Tensor, num_heads: int, num_queries: int | None, scale: float) -> Tensor:
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, N, D) each
    return F.scaled_dot_product_attention(q[:, :, :num_queries], k, v, scale=scale).transpose(1, 2).flatten(2)


def _fastest(
    qkv: Tensor,
    num_heads: int,
    cu_seqlens: Tensor | None = None,
    num_queries: int | None = None,
    scale: float = 1.0,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Take SDPA or a kernel on CUDA; SDPA knows neither segments nor the LN-folded form, which take a kernel then."""
    measured = cu_seqlens is None and qkv.shape[-1] == 3 * 64 * num_heads and num_queries is None
    card = device_name(qkv) if measured else None
    choice = "triton" if cu_seqlens is not None else choose(
        "packed_attention", qkv.shape[0], qkv.shape[1], num_heads, qkv.dtype, card
    )  # fmt: skip
    if choice == "sdpa" and (row_scale is not None or bias is not None):
        choice = "triton"
    if choice == "sdpa":
        return _attend(qkv, num_heads, num_queries, scale).contiguous()
    if choice == "short" and fits(qkv, num_heads, scale, row_scale is not None):
        return short_attention(qkv, num_heads, num_queries, scale, row_scale, bias)
    return launch(qkv, num_heads, cu_seqlens, num_queries, scale, row_scale, bias, max_seqlen)


@torch.library.custom_op("vtk_kernels::packed_attention", mutates_args=())
def _op(
    qkv: Tensor,
    num_heads: int,
    cu_seqlens: Tensor | None = None,
    num_queries: int | None = None,
    scale: float = 1.0,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    _check(qkv, num_heads, cu_seqlens, num_queries, row_scale, bias)
    run = _fastest if runs_kernel(qkv) else packed_attention_ref
    return run(qkv, num_heads, cu_seqlens, num_queries, scale, row_scale, bias, max_seqlen).contiguous()


@_op.register_fake
def _(qkv: Tensor, num_heads: int, cu_seqlens: Tensor | None = None, num_queries: int | None = None, *_: Any) -> Tensor:
    return qkv.new_empty(output_shape(qkv, cu_seqlens, num_queries))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    qkv, ctx.num_heads, cu_seqlens, ctx.num_queries, ctx.scale, row_scale, bias, _ = inputs
    ctx.save_for_backward(qkv, cu_seqlens, row_scale, bias)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    qkv, cu_seqlens, row_scale, bias = ctx.saved_tensors
    gqkv, gs, gb = packed_attention_backward(
        g, qkv, ctx.num_heads, cu_seqlens, ctx.num_queries, ctx.scale, row_scale, bias
    )
    return gqkv, None, None, None, None, None if row_scale is None else gs, None if bias is None else gb, None


_op.register_autograd(_backward, setup_context=_setup)


def packed_attention(
    qkv: Tensor,
    num_heads: int,
    cu_seqlens: Tensor | None = None,
    num_queries: int | None = None,
    scale: float = 1.0,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    max_seqlen: int | None = None,
    *,
    num_kv_heads: int | None = None,
    rope: Tensor | None = None,
    rotate_half: bool = False,
    rope_row: Tensor | None = None,
    qk_norm: HeadNorms | None = None,
    attn_bias: Tensor | None = None,
    use_triton: bool | None = None,
) -> Tensor:
    """Compute softmax(scale · q kᵀ + attn_bias) v for every head of every image or segment.

    Queries and keys are normalised first, then rotated, where that is asked for.

    The gradient computes attention again; with ``cu_seqlens`` on CUDA it waits for the device to learn the lengths.

    Args:
        qkv: (B, N, (H + 2·Hkv)·D), or (T, …) with ``cu_seqlens``; floating point; may be strided: q of all heads, k, v.
        num_heads: H, over all parallel branches; D is at most 128.
        cu_seqlens: (S + 1,) int32 on the device of ``qkv``: 0 and the end row of each segment, ascending; segments may
            be empty. Values are not checked on CUDA: that would wait for the device.
        num_queries: only the first so many tokens of each image or segment are queries; None for all.
        scale: factor of the logits; 1/√D unless it is inside q already.
        row_scale: (B, N) or (T,), fp32 (fp64 for fp64), times ``qkv`` before the bias; or None.
        bias: ((H + 2·Hkv)·D,), any floating type, added to ``qkv``; or None.
        max_seqlen: no segment is longer; needed with ``cu_seqlens`` on CUDA. Rows past it would not be written.
        num_kv_heads: Hkv, which divides H; query head h reads key head h · Hkv / H. None for H.
        rope: (R, D), or (H, R, D) per head; fp32 (fp64 for fp64). Row r has the cosines of D/2 angles, then the sines;
            a token that is not turned has cos 1, sin 0. None for no rotation.
        rotate_half: the pairs of channels are (i, i + D/2), else (2i, 2i + 1).
        rope_row: (B, N) or (T,), int32: each token's row of ``rope``; None: token n of an image or segment has row n.
        qk_norm: norms of queries and keys over the channels of a head; or None.
        attn_bias: (H, M, M), any floating type, M at least the tokens of an image: added to the logits of query i and
            key j. None for 0. Alone and on CUDA it goes to SDPA, or to the kernel where SDPA would copy it and thereby
            move an eighth more bytes: rows that do not begin at multiples of 8 elements, in few images.
        use_triton: None: on CUDA in fp16 and bf16 the kernel or SDPA, as `vtk_kernels.choices` says; False: torch;
            True: the kernel, with no gradient.

    Returns:
        (B, N, H·D) or (T, H·D), contiguous, the type of ``qkv``; rows after the last segment are zero. With
        ``num_queries`` (B, num_queries, H·D) or (S, num_queries, H·D); zero where a segment has fewer tokens.

    Raises:
        ValueError: shapes or types that do not fit, or ``use_triton=True`` where no kernel can run.
    """
    kv = num_heads if num_kv_heads is None else num_kv_heads
    heads = Heads(num_heads, kv, rope, rotate_half, rope_row, qk_norm, attn_bias)
    _check(qkv, num_heads, cu_seqlens, num_queries, row_scale, bias, heads.num_kv_heads)
    check_heads(qkv, heads, cu_seqlens)
    if not heads.plain:
        return _prepared(qkv, heads, cu_seqlens, num_queries, scale, row_scale, bias, max_seqlen, use_triton)
    run: Any
    way = route(qkv, use_triton, row_scale, bias)
    if cu_seqlens is not None:
        way = opaque(way, qkv, use_triton)
    if way == "reference":
        run = packed_attention_ref
    elif way == "operator":
        run = torch.ops.vtk_kernels.packed_attention
    else:
        run = launch if use_triton else _fastest
    return run(qkv, num_heads, cu_seqlens, num_queries, scale, row_scale, bias, max_seqlen)


def _prepared(
    qkv: Tensor,
    heads: Heads,
    cu_seqlens: Tensor | None,
    num_queries: int | None,
    scale: float,
    row_scale: Tensor | None,
    bias: Tensor | None,
    max_seqlen: int | None,
    use_triton: bool | None,
) -> Tensor:
    norms = () if heads.qk_norm is None else heads.qk_norm[2:]
    way = route(qkv, use_triton, row_scale, bias, heads.rope, heads.attn_bias, *norms)
    if cu_seqlens is not None:
        way = opaque(way, qkv, use_triton)
    more = (cu_seqlens, num_queries, scale, row_scale, bias, max_seqlen)
    if way == "operator":
        found: Tensor = torch.ops.vtk_kernels.rotary_attention(qkv, *more, heads.num_heads, *flat(heads))
        return found
    run = reference if way == "reference" else launch_rotary if use_triton else fastest
    return run(qkv, heads, *more)


def _check(
    qkv: Tensor,
    num_heads: int,
    cu_seqlens: Tensor | None,
    num_queries: int | None,
    row_scale: Tensor | None,
    bias: Tensor | None,
    num_kv_heads: int | None = None,
) -> None:
    check_channels(qkv, "qkv")
    width, kv = qkv.shape[-1], num_heads if num_kv_heads is None else num_kv_heads
    if kv != num_heads:
        _check_grouped(width, num_heads, kv)
    elif num_heads < 1 or width % (3 * num_heads) or width > 3 * num_heads * MAX_HEAD_DIM:
        raise ValueError(
            f"`num_heads` ({num_heads}) must split the {width} columns of `qkv` into q, k and v of equal heads, "
            f"at most {MAX_HEAD_DIM} channels each"
        )
    shape = "(B, N, 3·H·D)" if cu_seqlens is None else "(T, 3·H·D) with `cu_seqlens`"
    if qkv.ndim != (3 if cu_seqlens is None else 2):
        raise ValueError(f"`qkv` is {tuple(qkv.shape)}; it must be {shape}")
    if num_queries is not None and not 1 <= num_queries <= (qkv.shape[1] if cu_seqlens is None else num_queries):
        raise ValueError(f"`num_queries` ({num_queries}) must be from 1 to the number of tokens, {qkv.shape[1]}")
    check_row_scale(qkv, row_scale)
    if bias is not None and (bias.shape != qkv.shape[-1:] or not bias.is_floating_point()):
        raise ValueError(f"`bias` is {tuple(bias.shape)} {bias.dtype}; it must be ({width},), floating point")
    check_segments(cu_seqlens, qkv, "qkv")


def _check_grouped(width: int, num_heads: int, num_kv_heads: int) -> None:
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"`num_kv_heads` ({num_kv_heads}) must divide `num_heads` ({num_heads})")
    parts = num_heads + 2 * num_kv_heads
    if width % parts or width > parts * MAX_HEAD_DIM:
        raise ValueError(
            f"`num_heads` ({num_heads}) and `num_kv_heads` ({num_kv_heads}) must split the {width} columns of `qkv` "
            f"into {num_heads} heads of q, {num_kv_heads} of k and {num_kv_heads} of v, equal and of at most "
            f"{MAX_HEAD_DIM} channels"
        )
