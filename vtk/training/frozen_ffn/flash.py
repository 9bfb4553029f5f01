"""Attention and its gradient as two functions, by the kernels that torch's SDPA itself would run.

    o = softmax(scale · q kᵀ) v,    logsumexp of each row of scale · q kᵀ

torch's autograd keeps q, k, v, o and logsumexp together. Called apart, forward and backward may have q, k and v
computed twice and kept never; the gradients are SDPA's, bit for bit. Where torch has no flash kernel (fp32 and fp64 on
CUDA, head sizes that are no multiple of 8 there, other devices), plain matrix products do the same a few images at a
time.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Kernel = Literal["cpu", "cuda", "math"]

_SCORES = 1 << 26
"""Scores that plain products hold at once: 256 MB in fp32."""

_unread: dict[torch.device, tuple[Tensor, Tensor]] = {}
"""State of dropout's random generator, as a forward pass gave it: the backward wants it and, without dropout, does not
read it. Its type differs between versions of torch."""


def kernel_of(q: Tensor) -> Kernel:
    """Return what computes attention for queries like ``q`` (B, H, N, D)."""
    if q.device.type == "cpu":
        return "cpu"
    half = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type == "cuda" and half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and torch.version.hip is None:
        return "cuda" if torch.cuda.get_device_capability(q.device) >= (8, 0) else "math"
    return "math"


def attention(q: Tensor, k: Tensor, v: Tensor, kernel: Kernel | None = None) -> tuple[Tensor, Tensor]:
    """Compute attention.

    Args:
        q: (B, H, N, D), scaled by 1/√D inside; may be strided, its channels adjacent.
        k: like ``q``.
        v: like ``q``.
        kernel: by default `kernel_of`.

    Returns:
        o: (B, N, H, D), contiguous, the type of ``q``.
        logsumexp: (B, H, N), contiguous, fp32 (fp64 for fp64).
    """
    scale = 1 / math.sqrt(q.shape[-1])
    kernel = kernel or kernel_of(q)
    if kernel == "cpu":
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
    elif kernel == "cuda":
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
        o, lse = out[:2]
        _unread.setdefault(q.device, out[6:8])
    else:
        parts = [_plain(scale, *part) for part in _chunks(q, k, v)]
        o, lse = (torch.cat(whole) for whole in zip(*parts, strict=True))
    return o.transpose(1, 2).contiguous(), lse.contiguous()


def attention_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, kernel: Kernel | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v, each (B, H, N, D).

    Args:
        g: (B, N, H, D), gradient of ``o``.
        q: (B, H, N, D).
        k: like ``q``.
        v: like ``q``.
        o: (B, N, H, D), from `attention`.
        lse: (B, H, N), from `attention`.
        kernel: by default `kernel_of`.
    """
    scale = 1 / math.sqrt(q.shape[-1])
    kernel = kernel or kernel_of(q)
    g, o = g.transpose(1, 2), o.transpose(1, 2)
    if kernel == "cpu":
        back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gq, gk, gv = back(g, q, k, v, o, lse, 0.0, False, scale=scale)
    elif kernel == "cuda":
        back = torch.ops.aten._scaled_dot_product_flash_attention_backward
        size, state = q.shape[2], _unread[q.device]
        gq, gk, gv = back(g, q, k, v, o, lse, None, None, size, size, 0.0, False, *state, scale=scale)
    else:
        parts = [_plain_backward(scale, *part) for part in _chunks(g, q, k, v, o, lse)]
        gq, gk, gv = (torch.cat(whole) for whole in zip(*parts, strict=True))
    return gq, gk, gv


def _chunks(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Cut along images, so that the scores of a piece stay small."""
    _, heads, tokens = tensors[0].shape[:3]
    images = max(1, _SCORES // (heads * tokens * tokens))
    return list(zip(*(t.split(images) for t in tensors), strict=True))


def _plain(scale: float, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-2, -1)).to(wide) * scale
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse


def _plain_backward(
    scale: float, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    wide = lse.dtype
    share = ((q @ k.transpose(-2, -1)).to(wide) * scale - lse[..., None]).exp()
    gv = share.to(g.dtype).transpose(-2, -1) @ g
    drop = (g.to(wide) * o.to(wide)).sum(-1, keepdim=True)
    scores = (((g @ v.transpose(-2, -1)).to(wide) - drop) * share * scale).to(q.dtype)
    return scores @ k, scores.transpose(-2, -1) @ q, gv
