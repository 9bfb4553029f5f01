"""A frozen FFN that keeps GELU′ in a byte, or nothing, in place of its 4 C pre-activations.

    u = h · w1ᵀ + b1,    y = GELU(u) · w2ᵀ + b2,    h = x_hat ⊙ γ + β
    gh = ((g · w2) ⊙ GELU′(u)) · w1

No weight gradient is wanted, so of all that lies between h and y the gradient needs GELU′(u) alone. It is kept in 8
bits (`vtk_kernels.linear_gelu`; below bf16's rounding), or u is computed again from x_hat (exact).
GELU by the error function (Hendrycks, Gimpel, 2016).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.training.frozen_ffn._bodies import affine, body
from vtk_kernels.linear_gelu import linear_gelu, linear_gelu_backward


@torch.library.custom_op("vtk_training::frozen_ffn", mutates_args=())
@body
def _frozen_ffn(
    x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor | None,
    b2: Tensor | None, bytes_kept: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h = affine(x_hat, gamma, beta)
    if bytes_kept:
        hidden, slope = linear_gelu(h, w1, b1, save_grad=True)
    else:
        # in place: the two hidden tensors would otherwise be the largest of the whole step
        hidden, slope = torch.ops.aten.gelu_(F.linear(h, w1, b1)), h.new_empty(0, dtype=torch.uint8)
    return hidden if w2 is None else F.linear(hidden, w2, b2), slope


@_frozen_ffn.register_fake
def _(
    x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor | None,
    b2: Tensor | None, bytes_kept: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = x_hat.shape[:-1]
    y = x_hat.new_empty((*shape, w1.shape[0] if w2 is None else w2.shape[0]))
    return y, x_hat.new_empty((*shape, w1.shape[0]) if bytes_kept else (0,), dtype=torch.uint8)


@torch.library.custom_op("vtk_training::frozen_ffn_backward", mutates_args=())
@body
def _frozen_ffn_backward(
    g: Tensor, x_hat: Tensor | None, slope: Tensor | None, gamma: Tensor | None, beta: Tensor | None, w1: Tensor,
    b1: Tensor | None, w2: Tensor | None,
) -> Tensor:  # fmt: skip
    if slope is not None:
        if w2 is not None:
            gu = linear_gelu_backward(g, w2, slope)
        else:
            # through a layer that copies one channel: the bytes as numbers
            one = torch.ones(1, dtype=torch.promote_types(g.dtype, torch.float32), device=g.device)
            copies = one.expand(*slope.shape[:-1], 1), one.expand(1, slope.shape[-1])
            gu = (g * linear_gelu_backward(*copies, slope)).to(g.dtype)
    else:
        assert x_hat is not None
        u = F.linear(affine(x_hat, gamma, beta), w1, b1)
        hidden = g if w2 is None else g @ w2
        # over u, which nobody reads again
        gu = torch.ops.aten.gelu_backward.grad_input(hidden, u, grad_input=u)
    gx = gu @ w1
    return gx if gamma is None else gx.mul_(gamma)


@_frozen_ffn_backward.register_fake
def _(
    g: Tensor, x_hat: Tensor | None, slope: Tensor | None, gamma: Tensor | None, beta: Tensor | None, w1: Tensor,
    b1: Tensor | None, w2: Tensor | None,
) -> Tensor:  # fmt: skip
    return g.new_empty((*g.shape[:-1], w1.shape[1]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_hat, gamma, beta, w1, b1, w2, _, bytes_kept = inputs
    if bytes_kept:
        ctx.save_for_backward(None, output[1], gamma, None, w1, None, w2)
    else:
        ctx.save_for_backward(x_hat, None, gamma, beta, w1, b1, w2)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 7
    if g is None or not ctx.needs_input_grad[0]:
        return (None, *nothing)
    return (torch.ops.vtk_training.frozen_ffn_backward(g, *ctx.saved_tensors), *nothing)


_frozen_ffn.register_autograd(_differentiate, setup_context=_setup)


def frozen_ffn(
    x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor | None,
    b2: Tensor | None, bytes_kept: bool,
) -> Tensor:  # fmt: skip
    """Return GELU((x_hat ⊙ gamma + beta) · w1ᵀ + b1) · w2ᵀ + b2, with a gradient for ``x_hat`` only.

    Args:
        x_hat: (..., C), from `normalise` or any tokens.
        gamma: (C), of any floating type; or None.
        beta: (C); or None.
        w1: (F, C), weight of fc1, the type of ``x_hat``.
        b1: (F); or None.
        w2: (C, F), weight of fc2; None to stop after GELU.
        b2: (C); or None.
        bytes_kept: keep GELU′ in uint8 (F bytes a token); else keep ``x_hat`` and compute fc1 again.

    Returns:
        (..., C), or (..., F) without ``w2``; contiguous.
    """
    y: Tensor = torch.ops.vtk_training.frozen_ffn(x_hat, gamma, beta, w1, b1, w2, b2, bytes_kept)[0]
    return y
