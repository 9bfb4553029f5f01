"""LayerNorm without its affine part, or RMSNorm, and its gradient.

    x_hat = (x − mean) · rstd,    rstd = 1 / √(variance + eps)
    gx = rstd · (g − mean(g) − x_hat · mean(g · x_hat))

(Ba, Kiros, Hinton, Layer Normalization, 2016.) RMSNorm (Zhang, Sennrich, Root Mean Square Layer Normalization, 2019)
takes no mean of x and of g, and the mean square of x for the variance.

On request of x + bias, where a residual stream is kept without the biases that were added to it. Only x_hat and rstd
are kept for the gradient; x is not. One program holds one row of C channels in registers.
Elements moved per row: forward reads C and writes C and one rstd; backward reads 2 C and writes C.
"""

from typing import Any, no_type_check

import torch
from torch import Tensor

from vtk_kernels._device import chained, follow
from vtk_kernels._dispatch import LAUNCHES, accumulator, on_device, route, runs_kernel
from vtk_kernels._rows import as_rows, check_channels, contiguous, load_row, normalise_row, row_config
from vtk_kernels._triton import tl, triton

LAUNCHES["norm"] = 1
LAUNCHES["norm_backward"] = 1


def norm_ref(x: Tensor, eps: float, bias: Tensor | None = None, rms: bool = False) -> tuple[Tensor, Tensor]:
    """Compute `norm` by torch. Same arguments and results."""
    wide = x.to(accumulator(x.dtype))
    wide = wide if bias is None else wide + bias.to(wide.dtype)
    if rms:
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * rstd).to(x.dtype), rstd.squeeze(-1)
    x_hat, _, rstd = torch.native_layer_norm(wide, (x.shape[-1],), None, None, eps)
    return x_hat.to(x.dtype), rstd.squeeze(-1)


def norm_backward_ref(g: Tensor, x_hat: Tensor, rstd: Tensor, rms: bool = False) -> Tensor:
    """Compute the gradient of `norm` by torch.

    Args:
        g: (..., C), gradient of ``x_hat``.
        x_hat: (..., C).
        rstd: (...), fp32 or fp64.
        rms: of RMSNorm.

    Returns:
        Gradient of ``x``: (..., C), contiguous, the type of ``g``.
    """
    wide, h = g.to(rstd.dtype), x_hat.to(rstd.dtype)
    centred = wide if rms else wide - wide.mean(-1, keepdim=True)
    gx = rstd[..., None] * (centred - h * (wide * h).mean(-1, keepdim=True))
    return gx.to(g.dtype).contiguous()


@triton.jit
@no_type_check
def _norm_kernel(
    x_hat_ptr,  # out (T, C)
    rstd_ptr,  # out (T,), fp32
    x_ptr,  # (T, C)
    bias_ptr,  # (C,), or None
    stride_xt,  # from a row of x to the next
    C,
    eps,
    RMS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    follow(PDL)
    row, channel, mask, x = load_row(x_ptr, stride_xt, C, BLOCK_C)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    x_hat, rstd = normalise_row(x, mask, C, eps, RMS)
    tl.store(x_hat_ptr + row * C + channel, x_hat.to(x_hat_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
@no_type_check
def _norm_backward_kernel(
    gx_ptr,  # out (T, C)
    g_ptr,  # (T, C), gradient of x_hat
    x_hat_ptr,  # (T, C)
    rstd_ptr,  # (T,), fp32
    skip_ptr,  # (T, C), gradient that reaches x without the norm, or None
    stride_gt,  # from a row of g to the next
    stride_ht,  # of x_hat
    stride_st,  # of skip
    C,
    RMS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row, channel, mask, g = load_row(g_ptr, stride_gt, C, BLOCK_C)
    x_hat = tl.load(x_hat_ptr + row * stride_ht + channel, mask=mask, other=0.0).to(tl.float32)
    if RMS:
        gx = tl.load(rstd_ptr + row) * (g - x_hat * (tl.sum(g * x_hat, 0) / C))
    else:
        gx = tl.load(rstd_ptr + row) * (g - tl.sum(g, 0) / C - x_hat * (tl.sum(g * x_hat, 0) / C))
    if skip_ptr is not None:
        gx += tl.load(skip_ptr + row * stride_st + channel, mask=mask, other=0.0).to(tl.float32)
    tl.store(gx_ptr + row * C + channel, gx.to(gx_ptr.dtype.element_ty), mask=mask)


def _norm_launch(x: Tensor, eps: float, bias: Tensor | None = None, rms: bool = False) -> tuple[Tensor, Tensor]:
    x_hat = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    rows, channels = as_rows(x), x.shape[-1]
    block, warps = row_config(channels)
    if len(rows):
        with on_device(x):
            _norm_kernel[(len(rows),)](
                x_hat,
                rstd,
                rows,
                contiguous(bias),
                rows.stride(0),
                channels,
                float(eps),
                RMS=rms,
                BLOCK_C=block,
                num_warps=warps,
                **chained(x, len(rows)),
            )
    return x_hat, rstd


def norm_backward_launch(
    g: Tensor, x_hat: Tensor, rstd: Tensor, skip: Tensor | None = None, rms: bool = False
) -> Tensor:
    """Launch the gradient kernel, adding ``skip`` (..., C) if given; arguments as in `norm_backward_ref`."""
    gx = torch.empty(g.shape, dtype=g.dtype, device=g.device)
    grad, hat, channels = as_rows(g), as_rows(x_hat), g.shape[-1]
    past = None if skip is None else as_rows(skip)
    block, warps = row_config(channels)
    if len(grad):
        with on_device(g):
            _norm_backward_kernel[(len(grad),)](
                gx,
                grad,
                hat,
                rstd.contiguous(),
                past,
                grad.stride(0),
                hat.stride(0),
                0 if past is None else past.stride(0),
                channels,
                RMS=rms,
                BLOCK_C=block,
                num_warps=warps,
            )
    return gx


@torch.library.custom_op("vtk_kernels::norm", mutates_args=())
def _norm_op(x: Tensor, eps: float, bias: Tensor | None = None, rms: bool = False) -> tuple[Tensor, Tensor]:
    _check(x, bias)
    x_hat, rstd = (_norm_launch if runs_kernel(x) else norm_ref)(x, eps, bias, rms)
    return x_hat.contiguous(), rstd.contiguous()


@_norm_op.register_fake
def _(x: Tensor, eps: float, bias: Tensor | None = None, rms: bool = False) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=accumulator(x.dtype))


@torch.library.custom_op("vtk_kernels::norm_backward", mutates_args=())
def _norm_backward_op(g: Tensor, x_hat: Tensor, rstd: Tensor, rms: bool = False) -> Tensor:
    if runs_kernel(g):
        return norm_backward_launch(g, x_hat, rstd, rms=rms)
    return norm_backward_ref(g, x_hat, rstd, rms)


@_norm_backward_op.register_fake
def _(g: Tensor, x_hat: Tensor, rstd: Tensor, rms: bool = False) -> Tensor:
    return g.new_empty(g.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)
    ctx.bias, ctx.rms = None if inputs[2] is None else inputs[2].dtype, inputs[3]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, None, Tensor | None, None]:
    if g is None:
        return None, None, None, None
    gx = torch.ops.vtk_kernels.norm_backward(g, *ctx.saved_tensors, ctx.rms)
    gb = None if ctx.bias is None else gx.flatten(0, -2).sum(0, dtype=accumulator(gx.dtype)).to(ctx.bias)
    return gx, None, gb, None


_norm_op.register_autograd(_backward, setup_context=_setup)


def norm(
    x: Tensor, eps: float, bias: Tensor | None = None, rms: bool = False, *, use_triton: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Normalise each row of ``x`` to mean 0 and variance 1, or to mean square 1: a norm without weight and bias.

    Args:
        x: (..., C), floating point; may be strided.
        eps: added to the variance, or to the mean square.
        bias: (C,), any floating type, added to each row before; or None.
        rms: RMSNorm in place of LayerNorm.
        use_triton: None for the kernel on CUDA in fp16 and bf16; False for torch; True for the kernel, no gradient.

    Returns:
        x_hat: (..., C), contiguous, the type of ``x``.
        rstd: (...), 1/√(variance + eps), or 1/√(mean square + eps), in fp32 (fp64 for fp64). No gradient flows
            through it.

    Raises:
        ValueError: no channel, integers, a bias of another shape, or ``use_triton=True`` where no kernel can run.
    """
    _check(x, bias)
    way = route(x, use_triton, bias)
    if way == "reference":
        return norm_ref(x, eps, bias, rms)
    return (torch.ops.vtk_kernels.norm if way == "operator" else _norm_launch)(x, eps, bias, rms)


def _check(x: Tensor, bias: Tensor | None) -> None:
    check_channels(x)
    if bias is not None and (bias.shape != x.shape[-1:] or not bias.is_floating_point()):
        raise ValueError(f"`bias` is {tuple(bias.shape)} {bias.dtype}; it must be ({x.shape[-1]},), floating point")
