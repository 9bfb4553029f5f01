"""Attention and its gradient as two functions, by the kernels that torch's SDPA itself would run.

    o = softmax(scale · q kᵀ + bias) v,    logsumexp of each row of scale · q kᵀ + bias

torch's autograd keeps q, k, v, o and logsumexp together. Called apart, forward and backward may have q, k and v
computed twice and kept never; the gradients are SDPA's, bit for bit. On CUDA the kernel is FlashAttention's, or cuDNN's
where that was measured to be quicker forward and backward together (``kept_attention`` of `vtk_kernels.choices`). Where
torch has neither (fp32 and fp64 on CUDA, head sizes that are no multiple of 8 there, a bias there, other devices),
plain matrix products do the same a few images at a time; so they do for the gradient of a bias.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from vtk_kernels import choices

Kernel = Literal["cpu", "flash", "cudnn", "math"]

_SCORES = 1 << 26
"""Scores that plain products hold at once: 256 MB in fp32."""

_unread: dict[tuple[torch.device, Kernel], tuple[Tensor, Tensor]] = {}
"""State of dropout's random generator, as a forward pass gave it: the backward wants it and, without dropout, does not
read it. Its type differs between versions of torch."""

_HEAD = 64
"""Channels of a head that choices are about."""


def kernel_of(q: Tensor, biased: bool = False) -> Kernel:
    """Return what computes attention for queries like ``q`` (B, H, N, D), on request with a bias of the scores."""
    if q.device.type == "cpu":
        return "cpu"
    if biased:
        return "math"
    half = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type == "cuda" and half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and torch.version.hip is None:
        return _cuda_kernel(q) if torch.cuda.get_device_capability(q.device) >= (8, 0) else "math"
    return "math"


def _cuda_kernel(q: Tensor) -> Kernel:
    """Return what was measured to be the quicker for this shape, if torch takes it for cuDNN."""
    images, heads, tokens, channels = q.shape
    if channels != _HEAD:
        return "flash"
    chosen = choices.choose("kept_attention", images, tokens, heads, q.dtype, choices.device_name(q))
    if chosen == "cudnn" and _takes_cudnn(q):
        return "cudnn"
    return "flash"


def _takes_cudnn(q: Tensor) -> bool:
    params = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, False, False)
    return torch.backends.cuda.can_use_cudnn_attention(params)


def attention(
    q: Tensor, k: Tensor, v: Tensor, kernel: Kernel | None = None, *, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention.

    Args:
        q: (B, H, N, D), scaled by 1/√D inside; may be strided, its channels adjacent.
        k: like ``q``.
        v: like ``q``.
        kernel: by default `kernel_of`.
        bias: (H, N, N), the type of ``q``, added to the scores; or None. Of ``cpu`` and ``math``.

    Returns:
        o: (B, N, H, D), contiguous, the type of ``q``.
        logsumexp: (B, H, N), contiguous, fp32 (fp64 for fp64).
    """
    scale = 1 / math.sqrt(q.shape[-1])
    kernel = kernel or kernel_of(q, bias is not None)
    if kernel == "cpu":
        mask = None if bias is None else bias[None]
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    elif kernel in ("flash", "cudnn"):
        if kernel == "flash":
            out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
        else:
            run = torch.ops.aten._scaled_dot_product_cudnn_attention
            out = run(q, k, v, None, True, 0.0, False, False, scale=scale)
        o, lse = out[0], out[1].view(q.shape[:3])  # cuDNN's has one more dimension, of size 1
        _unread.setdefault((q.device, kernel), out[6:8])
    else:
        parts = [_plain(scale, bias, *part) for part in _chunks(q, k, v)]
        o, lse = (torch.cat(whole) for whole in zip(*parts, strict=True))
    return o.transpose(1, 2).contiguous(), lse.contiguous()


def attention_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, kernel: Kernel | None = None, *,
    bias: Tensor | None = None, bias_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of q, k and v, each (B, H, N, D).

    Args:
        g: (B, N, H, D), gradient of ``o``.
        q: (B, H, N, D).
        k: like ``q``.
        v: like ``q``.
        o: (B, N, H, D), from `attention`.
        lse: (B, H, N), from `attention`.
        kernel: by default `kernel_of`.
        bias: as of `attention`.
        bias_grad: (H, N, N), the type of ``lse``, to which the gradient of ``bias`` is added; or None for none.
    """
    scale = 1 / math.sqrt(q.shape[-1])
    kernel = kernel or kernel_of(q, bias is not None)
    g, o = g.transpose(1, 2), o.transpose(1, 2)
    if kernel == "cpu" and bias_grad is None:
        mask = None if bias is None else bias[None]
        back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gq, gk, gv = back(g, q, k, v, o, lse, 0.0, False, attn_mask=mask, scale=scale)
    elif kernel == "flash":
        back = torch.ops.aten._scaled_dot_product_flash_attention_backward
        size, state = q.shape[2], _unread[q.device, kernel]
        gq, gk, gv = back(g, q, k, v, o, lse, None, None, size, size, 0.0, False, *state, scale=scale)
    elif kernel == "cudnn":
        back = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        size, state = q.shape[2], _unread[q.device, kernel]
        rest = (*state, None, None, None, size, size, 0.0, False)  # no bias, no lengths of segments
        gq, gk, gv = back(g, q, k, v, o, lse[..., None], *rest, scale=scale)
    else:
        parts = [_plain_backward(scale, bias, bias_grad, *part) for part in _chunks(g, q, k, v, o, lse)]
        gq, gk, gv = (torch.cat(whole) for whole in zip(*parts, strict=True))
    return gq, gk, gv


def _chunks(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Cut along images, so that the scores of a piece stay small."""
    _, heads, tokens = tensors[0].shape[:3]
    images = max(1, _SCORES // (heads * tokens * tokens))
    return list(zip(*(t.split(images) for t in tensors), strict=True))


def _plain(scale: float, bias: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = _scores(scale, bias, q, k)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse


def _plain_backward(
    scale: float, bias: Tensor | None, bias_grad: Tensor | None, g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = lse.dtype
    share = (_scores(scale, bias, q, k) - lse[..., None]).exp()
    gv = share.to(g.dtype).transpose(-2, -1) @ g
    drop = (g.to(wide) * o.to(wide)).sum(-1, keepdim=True)
    scores = ((g @ v.transpose(-2, -1)).to(wide) - drop) * share
    if bias_grad is not None:
        bias_grad += scores.sum(0)
    scores = (scores * scale).to(q.dtype)
    return scores @ k, scores.transpose(-2, -1) @ q, gv


def _scores(scale: float, bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    return scores if bias is None else scores + bias
