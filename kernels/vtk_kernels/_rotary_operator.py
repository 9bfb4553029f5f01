"""Attention of prepared heads as an operator of torch, and which implementation it takes on CUDA.

The arguments are those of `packed_attention` with `vtk_kernels._heads.HeadNorms` taken apart: the schema of an operator
knows no tuples of tensors that may be absent.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk_kernels._attention_reference import reference
from vtk_kernels._dispatch import LAUNCHES, runs_kernel
from vtk_kernels._heads import HeadNorms, Heads, split
from vtk_kernels._heads_kernel import prepared
from vtk_kernels._rotary_attention import launch, output_shape
from vtk_kernels._rotary_backward import backward
from vtk_kernels.choices import choose, device_name

LAUNCHES["rotary_attention"] = 1

_SDPA_ALIGNED = 8
"""Elements that strides of a bias must be multiples of, or SDPA copies it at every call."""

_COPY = 1 / 8
"""Share of all other bytes from which on such a copy is too much."""


def fastest(
    qkv: Tensor,
    heads: Heads,
    cu_seqlens: Tensor | None = None,
    num_queries: int | None = None,
    scale: float = 1.0,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Take the kernel, or SDPA behind one that prepares heads; arguments and result as of `packed_attention`."""
    if cu_seqlens is None and _prefers_sdpa(qkv, heads, num_queries, row_scale is not None or bias is not None):
        return behind(qkv, heads, num_queries, scale, row_scale, bias)
    return launch(qkv, heads, cu_seqlens, num_queries, scale, row_scale, bias, max_seqlen)


def behind(
    qkv: Tensor,
    heads: Heads,
    num_queries: int | None = None,
    scale: float = 1.0,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute attention of whole batches by SDPA, behind the kernel that prepares heads where there is work for it."""
    folded, h = row_scale is not None or bias is not None, heads.num_heads
    qk, v = split(qkv, heads)
    if folded or heads.rope is not None or heads.qk_norm is not None:
        found = prepared(qkv, heads, row_scale, bias)
        qk, v = (found[:, :, : h + heads.num_kv_heads], found[:, :, h + heads.num_kv_heads :]) if folded else (found, v)
    q, k, v = (t.transpose(1, 2) for t in (qk[:, :num_queries, :h], qk[:, :, h:], v))
    logit_bias = heads.attn_bias
    if logit_bias is not None:
        logit_bias = logit_bias[:, : q.shape[2], : k.shape[2]].to(q.dtype)
    o = F.scaled_dot_product_attention(q, k, v, logit_bias, scale=scale, enable_gqa=heads.num_kv_heads < h)
    return o.transpose(1, 2).flatten(2).contiguous()


def _prefers_sdpa(qkv: Tensor, heads: Heads, num_queries: int | None, folded: bool) -> bool:
    if heads.rope is None and heads.qk_norm is None:
        return heads.num_kv_heads == heads.num_heads and not folded and not _copies_much(qkv, heads.attn_bias)
    usual = qkv.shape[-1] == 3 * 64 * heads.num_heads == 64 * heads.parts and num_queries is None
    card = device_name(qkv) if usual and heads.attn_bias is None else None
    return choose("rotary_attention", qkv.shape[0], qkv.shape[1], heads.num_heads, qkv.dtype, card) == "sdpa"


def _copies_much(qkv: Tensor, bias: Tensor | None) -> bool:
    """Return whether SDPA copies a bias, and moves many more bytes so.

    Kernel and SDPA read q, k, v and the bias and write o: B · (C + C/3) · N + H · N² elements. The copy reads H · N²
    and writes as many, 2 / (1 + 4 · B · D / N) of it: with 197 tokens and heads of 64 channels an eighth at 11 images.
    """
    if bias is None:
        return False
    strides = (bias.stride(0), bias.stride(1))
    if bias.dtype == qkv.dtype and bias.stride(2) == 1 and all(stride % _SDPA_ALIGNED == 0 for stride in strides):
        return False
    scores = bias.shape[0] * qkv.shape[1] ** 2
    return bool(2 * scores > _COPY * (qkv.numel() * 4 / 3 + scores))


def flat(heads: Heads) -> tuple[Any, ...]:
    """Return the fields of ``heads`` as the operator takes them, after ``num_heads``."""
    kind, eps, *tensors = heads.qk_norm or HeadNorms("layer", -1.0)
    return (heads.num_kv_heads, heads.rope, heads.rotate_half, heads.rope_row, kind, eps, *tensors, heads.attn_bias)


def _heads(num_heads: int, *fields: Any) -> Heads:
    """Undo `flat`; a negative eps stands for no norm."""
    num_kv_heads, rope, rotate_half, rope_row, kind, eps, *tensors, attn_bias = fields
    norm = None if eps < 0 else HeadNorms(cast(Any, kind), eps, *tensors)
    return Heads(num_heads, num_kv_heads, rope, rotate_half, rope_row, norm, attn_bias)


_ARGUMENTS = """Tensor qkv, Tensor? cu_seqlens, SymInt? num_queries, float scale, Tensor? row_scale, Tensor? bias,
    SymInt? max_seqlen, int num_heads, int num_kv_heads, Tensor? rope, bool rotate_half, Tensor? rope_row,
    str norm_kind, float norm_eps, Tensor? q_weight, Tensor? q_bias, Tensor? k_weight, Tensor? k_bias, Tensor? slot,
    Tensor? attn_bias"""

_GRADIENTS = {
    0: "qkv", 4: "row_scale", 5: "bias", 9: "rope", 14: "q_weight", 15: "q_bias", 16: "k_weight", 17: "k_bias",
    19: "attn_bias",
}  # fmt: skip
"""Argument to the name of its gradient."""


@torch.library.custom_op("vtk_kernels::rotary_attention", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def _op(qkv: Tensor, *arguments: Any) -> Tensor:
    cu_seqlens, num_queries, scale, row_scale, bias, max_seqlen, *fields = arguments
    run = fastest if runs_kernel(qkv) else reference
    return run(qkv, _heads(*fields), cu_seqlens, num_queries, scale, row_scale, bias, max_seqlen).contiguous()


@_op.register_fake
def _(qkv: Tensor, cu_seqlens: Tensor | None, num_queries: int | None, *rest: Any) -> Tensor:
    return qkv.new_empty(output_shape(qkv, _heads(*rest[4:]), cu_seqlens, num_queries))


@torch.library.custom_op(
    "vtk_kernels::rotary_attention_backward",
    mutates_args=(),
    schema=f"(Tensor g, {_ARGUMENTS}, int[] wanted) -> Tensor[]",
)
def _backward_op(g: Tensor, qkv: Tensor, *arguments: Any) -> list[Tensor]:
    """Compute the gradients of the arguments whose numbers are ``wanted``, each like its argument."""
    cu_seqlens, num_queries, scale, row_scale, bias, _, *fields, wanted = arguments
    found = backward(g, qkv, _heads(*fields), cu_seqlens, num_queries, scale, row_scale, bias)
    return [cast(Tensor, found[_GRADIENTS[i]]) for i in wanted]


@_backward_op.register_fake
def _(g: Tensor, *arguments: Any) -> list[Tensor]:
    return [arguments[i].new_empty(arguments[i].shape) for i in arguments[-1]]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.at = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
    ctx.others = [None if i in ctx.at else value for i, value in enumerate(inputs)]
    ctx.save_for_backward(*(inputs[i] for i in ctx.at))


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    inputs, gradients = list(ctx.others), [None] * len(ctx.others)
    for i, saved in zip(ctx.at, ctx.saved_tensors, strict=True):
        inputs[i] = saved
    wanted = [i for i in _GRADIENTS if ctx.needs_input_grad[i]]
    for i, gradient in zip(wanted, torch.ops.vtk_kernels.rotary_attention_backward(g, *inputs, wanted), strict=True):
        gradients[i] = gradient
    return tuple(gradients)


_op.register_autograd(_backward, setup_context=_setup)
