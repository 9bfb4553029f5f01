"""Linear layer and GELU in one matrix product (fc1 of an MLP), optionally with GELU′ kept in a byte.

    u = x · wᵀ + b, or rstd(row_stats, eps) ⊙ (x · wᵀ) + b,    y = u Φ(u),    q = round((GELU′(u) − LOW) / STEP)

GELU by the error function (Hendrycks, Gimpel, 2016). q is all that the backward through a frozen fc1 needs of u
(`linear_gelu_backward`); its error is at most half a step, 0.0025, less than bf16 does to a gradient. With statistics
of the rows of x it holds the rest of a LayerNorm whose centring is folded into w, for inference (see `row_stats`). A
program applies bias, GELU and q to the fp32 sums of a tile of y before it takes its next one: u never reaches memory.
Elements moved: reads x and w once per column and row of tiles (cached), writes T · F, and for q T · F bytes.
"""

from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk_kernels._dispatch import LAUNCHES, accumulator, inference, route, runs_kernel
from vtk_kernels._gelu import LOW, STEP
from vtk_kernels._linear_kernel import launch
from vtk_kernels._matmul import check_linear
from vtk_kernels.linear import pre_activation
from vtk_kernels.linear_gelu_backward import linear_gelu_backward
from vtk_kernels.row_stats import check_row_stats

__all__ = ["linear_gelu", "linear_gelu_backward", "linear_gelu_ref"]

LAUNCHES["linear_gelu"] = 1
LAUNCHES["linear_gelu_save"] = 1
LAUNCHES["linear_gelu_stats"] = 1


def linear_gelu_ref(
    x: Tensor, w: Tensor, b: Tensor | None, save_grad: bool = False, row_stats: Tensor | None = None,
    eps: float | None = None, rms: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `linear_gelu` by torch. Same arguments and results."""
    u = pre_activation(x, w, b, row_stats, eps, rms)
    y = F.gelu(u).to(x.dtype)
    if not save_grad:
        return y
    wide = u.detach().to(accumulator(u.dtype))
    slope = torch.special.ndtr(wide) + wide * torch.exp(-0.5 * wide * wide) * (2 * torch.pi) ** -0.5
    return y, ((slope - LOW) / STEP).round().clamp(0, 255).to(torch.uint8)


def _linear_gelu_launch(
    x: Tensor, w: Tensor, b: Tensor | None, save_grad: bool = False, row_stats: Tensor | None = None,
    eps: float | None = None, rms: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    y, q, _ = launch(x, w, b, activation=True, save_grad=save_grad, row_stats=row_stats, eps=eps, rms=rms)
    return y if q is None else (y, q)


@torch.library.custom_op("vtk_kernels::linear_gelu", mutates_args=())
def _op(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    check_linear(x, w, b)
    y = (_linear_gelu_launch if runs_kernel(x) else linear_gelu_ref)(x, w, b)
    assert isinstance(y, Tensor)
    return y.contiguous()


@torch.library.custom_op("vtk_kernels::linear_gelu_save", mutates_args=())
def _save_op(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
    check_linear(x, w, b)
    y, q = (_linear_gelu_launch if runs_kernel(x) else linear_gelu_ref)(x, w, b, True)
    return y.contiguous(), q.contiguous()


@torch.library.custom_op("vtk_kernels::linear_gelu_stats", mutates_args=())
def _stats_op(x: Tensor, w: Tensor, b: Tensor | None, row_stats: Tensor, eps: float, rms: bool = False) -> Tensor:
    check_linear(x, w, b)
    check_row_stats(x, row_stats, eps, rms)
    y = (_linear_gelu_launch if runs_kernel(x) else linear_gelu_ref)(x, w, b, False, row_stats, eps, rms)
    assert isinstance(y, Tensor)
    return y.contiguous()


@_op.register_fake
def _(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


@_save_op.register_fake
def _(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], w.shape[0])
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.uint8)


@_stats_op.register_fake
def _(x: Tensor, w: Tensor, b: Tensor | None, row_stats: Tensor, eps: float, rms: bool = False) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gy: Tensor, _: None = None) -> tuple[Tensor | None, ...]:
    x, w, b = ctx.saved_tensors
    wants = ctx.needs_input_grad
    gu = torch.ops.aten.gelu_backward(gy, F.linear(x, w, b))
    gb = gu.flatten(0, -2).sum(0, dtype=accumulator(gu.dtype)).to(b.dtype) if wants[2] else None
    gx = gu @ w if wants[0] else None
    gw = gu.flatten(0, -2).T @ x.flatten(0, -2) if wants[1] else None
    return gx, gw, gb


_op.register_autograd(_backward, setup_context=_setup)
_save_op.register_autograd(_backward, setup_context=_setup)


@overload
def linear_gelu(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    save_grad: Literal[False] = False,
    row_stats: Tensor | None = None,
    eps: float | None = None,
    rms: bool = False,
    *,
    use_triton: bool | None = None,
) -> Tensor: ...
@overload
def linear_gelu(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    save_grad: bool,
    row_stats: Tensor | None = None,
    eps: float | None = None,
    rms: bool = False,
    *,
    use_triton: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def linear_gelu(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    save_grad: bool = False,
    row_stats: Tensor | None = None,
    eps: float | None = None,
    rms: bool = False,
    *,
    use_triton: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multiply ``x`` by ``w``ᵀ, add ``b``, apply GELU.

    The gradient of y is exact: the backward computes u again from ``x``. With ``row_stats`` the kernel has none: where
    one is wanted torch computes, through the statistics too.

    Args:
        x: (..., K), floating point; may be strided.
        w: (F, K), the type of ``x``: the weight of `nn.Linear`.
        b: (F,), the type of ``x``; or None.
        save_grad: also return q; not with ``row_stats``.
        row_stats: (..., S, 2) of the rows of ``x``, S = ceil(K / 64), fp32 (fp64 for fp64), whose 1/√(variance + eps)
            scales x · wᵀ before the bias; or None. See `vtk_kernels.row_stats`.
        eps: added to the variance, or to the mean square; with ``row_stats`` alone.
        rms: scale by 1/√(mean square + eps), which is RMSNorm's; with ``row_stats`` alone.
        use_triton: None: the kernel on CUDA in fp16 and bf16; False: torch; True: the kernel, with no gradient.

    Returns:
        y: (..., F), contiguous, the type of ``x``. With ``save_grad`` also:
        q: (..., F), uint8, for `linear_gelu_backward`. No gradient flows through it.

    Raises:
        ValueError: shapes or types that do not fit, or ``use_triton=True`` where no kernel can run.
    """
    check_linear(x, w, b)
    check_row_stats(x, row_stats, eps, rms)
    if save_grad and row_stats is not None:
        raise ValueError("`save_grad` is for training, `row_stats` for inference: give one of them")
    way = route(x, use_triton, w, b, row_stats)
    if row_stats is not None:
        way = inference(way, x, w, b, row_stats)
    if way == "reference":
        return linear_gelu_ref(x, w, b, save_grad, row_stats, eps, rms)
    if way == "launcher":
        return _linear_gelu_launch(x, w, b, save_grad, row_stats, eps, rms)
    if row_stats is not None:
        return torch.ops.vtk_kernels.linear_gelu_stats(x, w, b, row_stats, eps, rms)
    op = torch.ops.vtk_kernels.linear_gelu_save if save_grad else torch.ops.vtk_kernels.linear_gelu
    return op(x, w, b)
