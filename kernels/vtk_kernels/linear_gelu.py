"""Linear layer and GELU in one matrix product (fc1 of an MLP), on request with GELU′ kept in a byte.

    u = row_scale ⊙ (x · wᵀ) + b,    y = u Φ(u),    q = round((GELU′(u) − LOW) / STEP)

GELU by the error function (Hendrycks, Gimpel, 2016). q is all that the backward through a frozen fc1 needs of u
(`linear_gelu_backward`); its error is at most half a step, 0.0025, less than bf16 does to a gradient. row_scale is the
rstd of a LayerNorm whose centring is folded into w. A program applies bias, GELU and q to the fp32 sums of a tile of y
before it takes its next one: u never reaches memory.
Elements moved: reads x and w once per column and row of tiles (cached), writes T · F, and for q T · F bytes.
"""

from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk_kernels._dispatch import LAUNCHES, accumulator, route, runs_kernel
from vtk_kernels._gelu import LOW, STEP
from vtk_kernels._linear_kernel import launch
from vtk_kernels._matmul import check_row_scale
from vtk_kernels._rows import check_channels
from vtk_kernels.linear_gelu_backward import linear_gelu_backward

__all__ = ["linear_gelu", "linear_gelu_backward", "linear_gelu_ref"]

LAUNCHES["linear_gelu"] = 1
LAUNCHES["linear_gelu_save"] = 1


def linear_gelu_ref(
    x: Tensor, w: Tensor, b: Tensor | None, save_grad: bool = False, row_scale: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `linear_gelu` by torch. Same arguments and results."""
    u = _pre_activation(x, w, b, row_scale)
    y = F.gelu(u).to(x.dtype)
    if not save_grad:
        return y
    wide = u.detach().to(accumulator(u.dtype))
    slope = torch.special.ndtr(wide) + wide * torch.exp(-0.5 * wide * wide) * (2 * torch.pi) ** -0.5
    return y, ((slope - LOW) / STEP).round().clamp(0, 255).to(torch.uint8)


def _pre_activation(x: Tensor, w: Tensor, b: Tensor | None, row_scale: Tensor | None) -> Tensor:
    if row_scale is None:
        return F.linear(x, w, b)
    u = F.linear(x, w) * row_scale[..., None]
    return u if b is None else u + b


def _linear_gelu_launch(
    x: Tensor, w: Tensor, b: Tensor | None, save_grad: bool = False, row_scale: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    y, q = launch(x, w, b, activation=True, save_grad=save_grad, row_scale=row_scale)
    return y if q is None else (y, q)


@torch.library.custom_op("vtk_kernels::linear_gelu", mutates_args=())
def _op(x: Tensor, w: Tensor, b: Tensor | None, row_scale: Tensor | None = None) -> Tensor:
    _check(x, w, b, row_scale)
    y = (_linear_gelu_launch if runs_kernel(x) else linear_gelu_ref)(x, w, b, False, row_scale)
    assert isinstance(y, Tensor)
    return y.contiguous()


@torch.library.custom_op("vtk_kernels::linear_gelu_save", mutates_args=())
def _save_op(x: Tensor, w: Tensor, b: Tensor | None, row_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    _check(x, w, b, row_scale)
    y, q = (_linear_gelu_launch if runs_kernel(x) else linear_gelu_ref)(x, w, b, True, row_scale)
    return y.contiguous(), q.contiguous()


@_op.register_fake
def _(x: Tensor, w: Tensor, b: Tensor | None, row_scale: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


@_save_op.register_fake
def _(x: Tensor, w: Tensor, b: Tensor | None, row_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], w.shape[0])
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.uint8)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gy: Tensor, _: None = None) -> tuple[Tensor | None, ...]:
    x, w, b, row_scale = ctx.saved_tensors
    wants = ctx.needs_input_grad
    u = _pre_activation(x, w, b, row_scale)
    gu = torch.ops.aten.gelu_backward(gy.to(u.dtype), u)
    gb = gu.flatten(0, -2).sum(0, dtype=accumulator(gu.dtype)).to(b.dtype) if wants[2] else None
    gz = (gu if row_scale is None else gu * row_scale[..., None]).to(x.dtype)
    gx = gz @ w if wants[0] else None
    gw = gz.flatten(0, -2).T @ x.flatten(0, -2) if wants[1] else None
    if row_scale is None or not wants[3]:  # an argument left to its default has no place in `wants`
        return gx, gw, gb, None
    return gx, gw, gb, (gu * F.linear(x, w)).sum(-1).to(row_scale.dtype)


_op.register_autograd(_backward, setup_context=_setup)
_save_op.register_autograd(_backward, setup_context=_setup)


@overload
def linear_gelu(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    save_grad: Literal[False] = False,
    row_scale: Tensor | None = None,
    *,
    use_triton: bool | None = None,
) -> Tensor: ...
@overload
def linear_gelu(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    save_grad: bool,
    row_scale: Tensor | None = None,
    *,
    use_triton: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def linear_gelu(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    save_grad: bool = False,
    row_scale: Tensor | None = None,
    *,
    use_triton: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multiply ``x`` by ``w``ᵀ, add ``b``, apply GELU.

    The gradient of y is exact: the backward computes u again from ``x``.

    Args:
        x: (..., K), floating point; may be strided.
        w: (F, K), the type of ``x``: the weight of `nn.Linear`.
        b: (F,), the type of ``x``; or None.
        save_grad: also return q.
        row_scale: (...), fp32 (fp64 for fp64), times x · wᵀ before the bias; or None.
        use_triton: None: the kernel on CUDA in fp16 and bf16; False: torch; True: the kernel, with no gradient.

    Returns:
        y: (..., F), contiguous, the type of ``x``. With ``save_grad`` also:
        q: (..., F), uint8, for `linear_gelu_backward`. No gradient flows through it.

    Raises:
        ValueError: shapes or types that do not fit, or ``use_triton=True`` where no kernel can run.
    """
    _check(x, w, b, row_scale)
    way = route(x, use_triton, w, b, row_scale)
    if way == "reference":
        return linear_gelu_ref(x, w, b, save_grad, row_scale)
    if way == "launcher":
        return _linear_gelu_launch(x, w, b, save_grad, row_scale)
    op = torch.ops.vtk_kernels.linear_gelu_save if save_grad else torch.ops.vtk_kernels.linear_gelu
    return op(x, w, b, row_scale)


def _check(x: Tensor, w: Tensor, b: Tensor | None, row_scale: Tensor | None) -> None:
    check_channels(x)
    if w.ndim != 2 or w.shape[1] != x.shape[-1] or w.dtype != x.dtype:
        raise ValueError(
            f"`w` is {tuple(w.shape)} {w.dtype}; it must be (F, {x.shape[-1]}) {x.dtype}, the weight of a linear layer"
        )
    if b is not None and (b.shape != w.shape[:1] or b.dtype != x.dtype):
        raise ValueError(f"`b` is {tuple(b.shape)} {b.dtype}; it must be ({w.shape[0]},) {x.dtype}, or None")
    check_row_scale(x, row_scale)
