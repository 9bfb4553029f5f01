"""A frozen FFN that keeps nothing of its own for backward: its first layer is computed again from x_hat, exactly.

    u = h · w1ᵀ + b1,    y = act(u);    gated: u = (gate | value),    y = act(gate) ⊙ value
    o = y · w2ᵀ + b2, or (norm(y) ⊙ γ' + β') · w2ᵀ + b2,    h = x_hat ⊙ γ + β

No weight gradient is wanted, so the gradient needs of all that lies between h and y the slopes alone.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk.training.frozen_ffn._bodies import affine, body
from vtk.training.frozen_ffn.activations import activate_, activation_backward_
from vtk.training.frozen_ffn.linear import linears, linears_backward
from vtk.training.frozen_ffn.parts import Activation, NormForm
from vtk_kernels.norm import norm


class FirstLayer(NamedTuple):
    """The frozen first layer of an FFN and the affine part of the norm before it.

    Attributes:
        gamma: (C), of any floating type; or None.
        beta: (C); or None.
        w: (F, C), or gate and value; the type of the tokens.
        b: (F), or (2 F), gate first; or None.
        activation: of the layer, or of the gate.
    """

    gamma: Tensor | None
    beta: Tensor | None
    w: tuple[Tensor, ...]
    b: Tensor | None
    activation: Activation


class SecondLayer(NamedTuple):
    """The frozen second layer of an FFN, and the norm of the hidden layer before it.

    Attributes:
        form: the norm; or None.
        gamma: (F), its affine part; or None.
        beta: (F); or None.
        w: (C, F); None to stop before it.
        b: (C); or None.
    """

    form: NormForm | None
    gamma: Tensor | None
    beta: Tensor | None
    w: Tensor | None
    b: Tensor | None


@torch.library.custom_op("vtk_training::frozen_ffn", mutates_args=())
@body
def _frozen_ffn(
    x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w1: Sequence[Tensor], b1: Tensor | None,
    inner_gamma: Tensor | None, inner_beta: Tensor | None, w2: Tensor | None, b2: Tensor | None, act: str,
    inner_eps: float, inner_rms: bool,
) -> Tensor:  # fmt: skip
    # in place: the hidden tensors would otherwise be the largest of the whole step
    u = linears(affine(x_hat, gamma, beta), w1, b1)
    hidden = activate_(u[0], act)
    if len(u) == 2:
        hidden.mul_(u[1])
    if inner_eps >= 0:
        hidden = affine(norm(hidden, inner_eps, rms=inner_rms)[0], inner_gamma, inner_beta)
    return hidden if w2 is None else F.linear(hidden, w2, b2)


@_frozen_ffn.register_fake
def _(
    x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w1: Sequence[Tensor], b1: Tensor | None,
    inner_gamma: Tensor | None, inner_beta: Tensor | None, w2: Tensor | None, b2: Tensor | None, act: str,
    inner_eps: float, inner_rms: bool,
) -> Tensor:  # fmt: skip
    return x_hat.new_empty((*x_hat.shape[:-1], w1[0].shape[0] if w2 is None else w2.shape[0]))


@torch.library.custom_op("vtk_training::frozen_ffn_backward", mutates_args=())
@body
def _frozen_ffn_backward(
    g: Tensor, x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w1: Sequence[Tensor], b1: Tensor | None,
    inner_gamma: Tensor | None, w2: Tensor | None, act: str, inner_eps: float, inner_rms: bool,
) -> Tensor:  # fmt: skip
    u = linears(affine(x_hat, gamma, beta), w1, b1)
    gy = g if w2 is None else g @ w2
    first = activate_(u[0].clone(), act) if len(u) == 2 or inner_eps >= 0 else None
    if inner_eps >= 0:
        assert first is not None
        normed, rstd = norm(first if len(u) == 1 else first * u[1], inner_eps, rms=inner_rms)
        gy = gy if inner_gamma is None else (gy * inner_gamma).to(gy.dtype)
        gy = torch.ops.vtk_training.normalise_backward(gy, normed, rstd, inner_rms, gy.dtype)
        del normed
    if len(u) == 2:
        assert first is not None
        value = first.mul_(gy)
        gu = [activation_backward_(u[1].mul_(gy), u[0], act), value]
    else:
        gu = [activation_backward_(gy, u[0], act)]  # over u, which nobody reads again
    gx = linears_backward(gu, w1)
    return gx if gamma is None else gx.mul_(gamma)


@_frozen_ffn_backward.register_fake
def _(
    g: Tensor, x_hat: Tensor, gamma: Tensor | None, beta: Tensor | None, w1: Sequence[Tensor], b1: Tensor | None,
    inner_gamma: Tensor | None, w2: Tensor | None, act: str, inner_eps: float, inner_rms: bool,
) -> Tensor:  # fmt: skip
    return x_hat.new_empty(x_hat.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_hat, gamma, beta, w1, b1, inner_gamma, _, w2, _, *ctx.numbers = inputs
    ctx.save_for_backward(x_hat, gamma, beta, b1, inner_gamma, w2, *w1)


def _differentiate(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    x_hat, gamma, beta, b1, inner_gamma, w2, *w1 = ctx.saved_tensors
    gx = None
    if ctx.needs_input_grad[0]:
        run = torch.ops.vtk_training.frozen_ffn_backward
        gx = run(g, x_hat, gamma, beta, w1, b1, inner_gamma, w2, *ctx.numbers)
    return gx, None, None, [None] * len(w1), *(None,) * 8


_frozen_ffn.register_autograd(_differentiate, setup_context=_setup)


def frozen_ffn(x_hat: Tensor, first: FirstLayer, second: SecondLayer) -> Tensor:
    """Return the FFN of ``x_hat`` (..., C), with a gradient for ``x_hat`` only, which alone is kept.

    Args:
        x_hat: from `normalise` or any tokens.
        first: fc1.
        second: fc2.

    Returns:
        (..., C), or (..., F) where there is no second layer; contiguous.
    """
    eps, rms = second.form or (-1.0, False)
    y: Tensor = torch.ops.vtk_training.frozen_ffn(
        x_hat, first.gamma, first.beta, first.w, first.b, second.gamma, second.beta, second.w, second.b,
        first.activation, eps, rms,
    )  # fmt: skip
    return y
