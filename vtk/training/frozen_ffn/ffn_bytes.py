"""A frozen FFN that keeps the slopes of its activation in 8 bits in place of its pre-activations.

    u = h · w1ᵀ + b1,    y = act(u),                 gu = (g · w2) ⊙ act′(u):                 a byte a channel
    gated: u = (gate | value),    y = SiLU(gate) ⊙ value,    gu = (g · w2) ⊙ (value ⊙ SiLU′(gate) | SiLU(gate)): two
    o = y · w2ᵀ + b2,    h = x_hat ⊙ γ + β,    gh = gu · w1

What a byte loses is less than bf16's rounding (`vtk_kernels.linear_gelu`), or 1/254 of the largest of 64 factors
(`vtk_kernels.linear_swiglu`).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.training.frozen_ffn._bodies import affine, body
from vtk.training.frozen_ffn.activations import activate_, slope_bytes
from vtk.training.frozen_ffn.ffn import FirstLayer
from vtk.training.frozen_ffn.linear import linears_backward, packed
from vtk_kernels.linear_gelu import linear_gelu, linear_gelu_backward
from vtk_kernels.linear_swiglu import linear_swiglu, linear_swiglu_backward
from vtk_kernels.row_stats import pieces_of


@torch.library.custom_op("vtk_training::bytes_ffn", mutates_args=())
@body
def _bytes_ffn(
    x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w1: Sequence[Tensor], b1: Tensor | None,
    w2: Tensor | None, b2: Tensor | None, act: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    h = affine(x_hat, gamma, beta)
    scales = h.new_empty(0)
    if len(w1) == 2:
        hidden, q, scales = linear_swiglu(h, packed(w1), b1, save_grad=True)
    elif act == "gelu":
        hidden, q = linear_gelu(h, w1[0], b1, save_grad=True)
    else:
        u = F.linear(h, w1[0], b1)
        q = slope_bytes(u, act)
        hidden = activate_(u, act)
    return hidden if w2 is None else F.linear(hidden, w2, b2), q, scales


@_bytes_ffn.register_fake
def _(
    x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w1: Sequence[Tensor], b1: Tensor | None,
    w2: Tensor | None, b2: Tensor | None, act: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shape, features = x_hat.shape[:-1], w1[0].shape[0]
    y = x_hat.new_empty((*shape, features if w2 is None else w2.shape[0]))
    q = x_hat.new_empty((*shape, len(w1) * features), dtype=torch.uint8)
    if len(w1) == 1:
        return y, q, x_hat.new_empty(0)
    wide = torch.promote_types(x_hat.dtype, torch.float32)
    return y, q, x_hat.new_empty((*shape, pieces_of(features), 2), dtype=wide)


@torch.library.custom_op("vtk_training::bytes_ffn_backward", mutates_args=())
@body
def _bytes_ffn_backward(
    g: Tensor, q: Tensor, scales: Tensor, gamma: Tensor | None, w1: Sequence[Tensor], w2: Tensor | None
) -> Tensor:
    if len(w1) == 2:
        gu = linear_swiglu_backward(g, w2, q, scales)
    elif w2 is not None:
        gu = linear_gelu_backward(g, w2, q)
    else:
        # through a layer that copies one channel: the bytes as numbers
        one = torch.ones(1, dtype=torch.promote_types(g.dtype, torch.float32), device=g.device)
        copies = one.expand(*q.shape[:-1], 1), one.expand(1, q.shape[-1])
        gu = (g * linear_gelu_backward(*copies, q)).to(g.dtype)
    gx = linears_backward(gu.chunk(len(w1), -1), w1)
    return gx if gamma is None else gx.mul_(gamma)


@_bytes_ffn_backward.register_fake
def _(g: Tensor, q: Tensor, scales: Tensor, gamma: Tensor | None, w1: Sequence[Tensor], w2: Tensor | None) -> Tensor:
    return g.new_empty((*g.shape[:-1], w1[0].shape[1]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, gamma, _, w1, _, w2, _, _ = inputs
    ctx.save_for_backward(*output[1:], gamma, w2, *w1)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, g: Tensor | None, *_: None) -> tuple[Any, ...]:
    q, scales, gamma, w2, *w1 = ctx.saved_tensors
    gx = None
    if g is not None and ctx.needs_input_grad[0]:
        gx = torch.ops.vtk_training.bytes_ffn_backward(g, q, scales, gamma, w1, w2)
    return gx, None, None, [None] * len(w1), None, None, None, None


_bytes_ffn.register_autograd(_differentiate, setup_context=_setup)


def bytes_ffn(x_hat: Tensor, first: FirstLayer, w2: Tensor | None, b2: Tensor | None) -> Tensor:
    """Return the FFN of ``x_hat`` (..., C), with a gradient for ``x_hat`` only; only bytes are kept.

    Args:
        x_hat: from `normalise` or any tokens.
        first: fc1; a gated one has SiLU.
        w2: (C, F), weight of fc2; None to stop before it.
        b2: (C); or None.

    Returns:
        (..., C), or (..., F) without ``w2``; contiguous.
    """
    y: Tensor = torch.ops.vtk_training.bytes_ffn(
        x_hat, first.gamma, first.beta, first.w, first.b, w2, b2, first.activation
    )[0]
    return y
