"""LayerNorm or RMSNorm with a frozen affine part, which keeps x_hat in place of x and of the result.

    x_hat = (x − mean) · rstd, or x · rstd,    h = x_hat ⊙ γ + β

(Ba, Kiros, Hinton, 2016; Zhang, Sennrich, 2019.)

torch keeps x for the norm's gradient and h for the weight gradient of the layer behind it. x_hat serves both: h is one
multiplication and addition away. All modes use these operators, so that they compute the same numbers.
"""

from typing import Any

import torch
from torch import Tensor

from vtk.training.frozen_ffn._bodies import body
from vtk.training.frozen_ffn.parts import NormForm
from vtk_kernels.add_norm import add_norm, add_norm_backward_ref
from vtk_kernels.norm import norm, norm_backward_ref


@torch.library.custom_op("vtk_training::normalise", mutates_args=())
@body
def _normalise(x: Tensor, eps: float, rms: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x_hat, rstd = norm(x, eps, rms=rms)
    return x_hat.to(dtype).contiguous(), rstd.contiguous()


@_normalise.register_fake
def _(x: Tensor, eps: float, rms: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=wide)


@torch.library.custom_op("vtk_training::normalise_backward", mutates_args=())
@body
def _normalise_backward(g: Tensor, x_hat: Tensor, rstd: Tensor, rms: bool, dtype: torch.dtype) -> Tensor:
    if g.is_cuda and g.dtype == dtype and dtype != rstd.dtype:
        return torch.ops.vtk_kernels.norm_backward(g, x_hat, rstd, rms)
    if dtype != rstd.dtype or rms:
        return norm_backward_ref(g, x_hat, rstd, rms).to(dtype)
    # torch's own kernel, with x_hat as its input, of mean 0 and variance 1
    zero, one = torch.zeros_like(rstd[..., None]), torch.ones_like(rstd[..., None])
    wide, shape = x_hat.to(dtype), x_hat.shape[-1:]
    gx = torch.ops.aten.native_layer_norm_backward(
        g.to(dtype), wide, shape, zero, one, None, None, [True, False, False]
    )[0]
    return gx.mul_(rstd[..., None])


@_normalise_backward.register_fake
def _(g: Tensor, x_hat: Tensor, rstd: Tensor, rms: bool, dtype: torch.dtype) -> Tensor:
    return x_hat.new_empty(x_hat.shape, dtype=dtype)


def _setup_normalise(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.dtype, ctx.rms = inputs[0].dtype, inputs[2]


def _differentiate_normalise(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, None, None, None]:
    if g is None:
        return None, None, None, None
    return torch.ops.vtk_training.normalise_backward(g, *ctx.saved_tensors, ctx.rms, ctx.dtype), None, None, None


_normalise.register_autograd(_differentiate_normalise, setup_context=_setup_normalise)


def normalise(x: Tensor, form: NormForm, dtype: torch.dtype) -> Tensor:
    """Return the norm of ``x`` without its affine part, in ``dtype``; the result and rstd are kept, ``x`` is not.

    Args:
        x: (..., C), floating point.
        form: the norm.
        dtype: of the result: that of the layers behind.

    Returns:
        (..., C), contiguous. Statistics are fp32, or fp64 for fp64.
    """
    x_hat: Tensor = torch.ops.vtk_training.normalise(x, form.eps, form.rms, dtype)[0]
    return x_hat


@torch.library.custom_op("vtk_training::add_normalise", mutates_args=())
@body
def _add_normalise(x: Tensor, r: Tensor, eps: float, rms: bool) -> tuple[Tensor, Tensor, Tensor]:
    y, x_hat, rstd = add_norm(x, r, eps, rms=rms)
    return y.contiguous(), x_hat.contiguous(), rstd.contiguous()


@_add_normalise.register_fake
def _(x: Tensor, r: Tensor, eps: float, rms: bool) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=wide)


@torch.library.custom_op("vtk_training::add_normalise_backward", mutates_args=())
@body
def _add_normalise_backward(gy: Tensor, gh: Tensor, x_hat: Tensor, rstd: Tensor, rms: bool) -> Tensor:
    if x_hat.dtype == rstd.dtype:
        gx: Tensor = torch.ops.vtk_training.normalise_backward(gh, x_hat, rstd, rms, x_hat.dtype)
        return gx.add_(gy)
    if gh.is_cuda and gh.dtype == x_hat.dtype == gy.dtype:
        fused: Tensor = torch.ops.vtk_kernels.add_norm_backward(gy, gh, x_hat, rstd, rms)
        return fused
    return add_norm_backward_ref(gy, gh, x_hat, rstd, rms).to(x_hat.dtype)


@_add_normalise_backward.register_fake
def _(gy: Tensor, gh: Tensor, x_hat: Tensor, rstd: Tensor, rms: bool) -> Tensor:
    return x_hat.new_empty(x_hat.shape)


def _setup_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.rms = inputs[3]
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _differentiate_add(ctx: Any, gy: Tensor | None, gh: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if gh is None:
        return gy, gy, None, None
    x_hat, rstd = ctx.saved_tensors
    if gy is None:
        g = torch.ops.vtk_training.normalise_backward(gh, x_hat, rstd, ctx.rms, x_hat.dtype)
    else:
        g = torch.ops.vtk_training.add_normalise_backward(gy, gh, x_hat, rstd, ctx.rms)
    return g, g, None, None


_add_normalise.register_autograd(_differentiate_add, setup_context=_setup_add)


def add_normalise(x: Tensor, r: Tensor, form: NormForm) -> tuple[Tensor, Tensor]:
    """Return x + r, and its norm without affine part; of both gradients' needs only the latter and rstd are kept.

    Args:
        x: (..., C), floating point.
        r: like ``x``.
        form: the norm.

    Returns:
        y: (..., C), contiguous, the type of ``x``.
        x_hat: (..., C), of y before it is rounded, contiguous, the type of ``x``.
    """
    y, x_hat, _ = torch.ops.vtk_training.add_normalise(x, r, form.eps, form.rms)
    return y, x_hat
