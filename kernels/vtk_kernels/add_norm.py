"""Residual addition and the norm (no affine part) of the sum in one pass, optionally closing a split-K product.

    y = x + r,   r given, or r = Σ_s partials[s] + bias   (s ascending: the same bits every time)
    x_hat, rstd = LayerNorm or RMSNorm of y before it is rounded to the type of x
    g = gy + rstd · (gh − mean(gh) − x_hat · mean(gh · x_hat))    for x and for r alike

The gradient is LayerNorm's; `norm` says how RMSNorm's differs. x may be a table (1, N, C), the same for every image of
a batch; its gradient is the sum of g over them. Only x_hat and rstd are kept for the gradient. One program holds one
row of C channels in registers. Elements moved per row: forward reads 2 C (with partials C, and S C in fp32) and writes
2 C and one rstd; backward reads 3 C and writes C.
"""

from typing import Any, no_type_check

import torch
from torch import Tensor

from vtk_kernels._device import chained, fetch, follow
from vtk_kernels._dispatch import LAUNCHES, accumulator, on_device, route, runs_kernel
from vtk_kernels._rows import as_rows, check_channels, contiguous, normalise_row, row_config
from vtk_kernels._triton import tl, triton
from vtk_kernels.norm import norm_backward_launch, norm_backward_ref, norm_ref

LAUNCHES["add_norm"] = 1
LAUNCHES["add_norm_backward"] = 1


def add_norm_ref(
    x: Tensor, r: Tensor | None, eps: float, partials: Tensor | None = None, bias: Tensor | None = None,
    rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `add_norm` by torch. Same arguments and results."""
    wide = accumulator(x.dtype)
    if partials is not None:
        r = partials[0]
        for part in partials[1:]:
            r = r + part
        r = r if bias is None else r + bias.to(wide)
    assert r is not None
    total = x.to(wide) + r.to(wide)
    x_hat, rstd = norm_ref(total, eps, rms=rms)
    return total.to(x.dtype), x_hat.to(x.dtype), rstd


def add_norm_backward_ref(gy: Tensor, gh: Tensor, x_hat: Tensor, rstd: Tensor, rms: bool = False) -> Tensor:
    """Compute the gradient that `add_norm` gives to ``x`` and to ``r`` by torch.

    Args:
        gy: (..., C), gradient of ``y``.
        gh: (..., C), gradient of ``x_hat``.
        x_hat: (..., C).
        rstd: (...), fp32 or fp64.
        rms: of RMSNorm.

    Returns:
        (..., C), contiguous, the type of ``gh``.
    """
    wide = rstd.dtype
    return (gy.to(wide) + norm_backward_ref(gh.to(wide), x_hat, rstd, rms)).to(gh.dtype).contiguous()


@triton.jit
@no_type_check
def _add_norm_kernel(
    y_ptr,  # out (T, C)
    x_hat_ptr,  # out (T, C)
    rstd_ptr,  # out (T,), fp32
    x_ptr,  # (T, C), or (period, C)
    r_ptr,  # (T, C), or None
    partials_ptr,  # (SPLITS, T, C), fp32, where r is None
    bias_ptr,  # (C,) beside partials, or None
    stride_xt,  # from a row of x to the next
    stride_rt,  # of r
    stride_ps,  # from a slice of partials to the next
    period,  # rows of x after which it repeats, or None
    C,
    eps,
    RMS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and bias_ptr is not None:
        fetch(bias_ptr, C, tl.program_id(0), tl.num_programs(0))
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK_C)
    mask = channel < C
    if r_ptr is not None:
        r = tl.load(r_ptr + row * stride_rt + channel, mask=mask, other=0.0).to(tl.float32)
    else:
        part_ptr = partials_ptr + row * C + channel
        r = tl.load(part_ptr, mask=mask, other=0.0)
        for _ in tl.static_range(1, SPLITS):
            part_ptr += stride_ps
            r += tl.load(part_ptr, mask=mask, other=0.0)
        if bias_ptr is not None:
            r += tl.load(bias_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    x_row = row
    if period is not None:
        x_row = (tl.program_id(0) % period).to(tl.int64)
    y = tl.load(x_ptr + x_row * stride_xt + channel, mask=mask, other=0.0).to(tl.float32) + r
    x_hat, rstd = normalise_row(y, mask, C, eps, RMS)
    tl.store(y_ptr + row * C + channel, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(x_hat_ptr + row * C + channel, x_hat.to(x_hat_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd)


def _add_norm_launch(
    x: Tensor, r: Tensor | None, eps: float, partials: Tensor | None = None, bias: Tensor | None = None,
    rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shape = _shape(r, partials)
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    x_hat = torch.empty(shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(shape[:-1], dtype=torch.float32, device=x.device)
    rows, channels = as_rows(x), x.shape[-1]
    added = None if r is None else as_rows(r)
    parts = contiguous(partials)
    block, warps = row_config(channels)
    if rstd.numel():
        with on_device(x):
            _add_norm_kernel[(rstd.numel(),)](
                y,
                x_hat,
                rstd,
                rows,
                added,
                parts,
                contiguous(bias),
                rows.stride(0),
                0 if added is None else added.stride(0),
                0 if parts is None else parts.stride(0),
                len(rows) if len(rows) < rstd.numel() else None,
                channels,
                float(eps),
                RMS=rms,
                SPLITS=0 if parts is None else len(parts),
                BLOCK_C=block,
                num_warps=warps,
                **chained(x, rstd.numel()),
            )
    return y, x_hat, rstd


@torch.library.custom_op("vtk_kernels::add_norm", mutates_args=())
def _add_norm_op(
    x: Tensor, r: Tensor | None, eps: float, partials: Tensor | None = None, bias: Tensor | None = None,
    rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check(x, r, partials, bias)
    y, x_hat, rstd = (_add_norm_launch if runs_kernel(x) else add_norm_ref)(x, r, eps, partials, bias, rms)
    return y.contiguous(), x_hat.contiguous(), rstd.contiguous()


@_add_norm_op.register_fake
def _(
    x: Tensor, r: Tensor | None, eps: float, partials: Tensor | None = None, bias: Tensor | None = None,
    rms: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shape = _shape(r, partials)
    return x.new_empty(shape), x.new_empty(shape), x.new_empty(shape[:-1], dtype=accumulator(x.dtype))


@torch.library.custom_op("vtk_kernels::add_norm_backward", mutates_args=())
def _add_norm_backward_op(gy: Tensor, gh: Tensor, x_hat: Tensor, rstd: Tensor, rms: bool = False) -> Tensor:
    if runs_kernel(gh):
        return norm_backward_launch(gh, x_hat, rstd, gy, rms)
    return add_norm_backward_ref(gy, gh, x_hat, rstd, rms)


@_add_norm_backward_op.register_fake
def _(gy: Tensor, gh: Tensor, x_hat: Tensor, rstd: Tensor, rms: bool = False) -> Tensor:
    return gh.new_empty(gh.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, x_hat, rstd = output
    ctx.save_for_backward(x_hat, rstd)
    ctx.repeats = inputs[0].shape != x_hat.shape
    ctx.like = [None if t is None else (t.dtype, t.shape) for t in inputs[3:5]]
    ctx.rms = inputs[5]
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gy: Tensor | None, gh: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if gh is None and gy is None:
        return (None,) * 6
    if gh is None:
        g = gy
    elif gy is None:
        g = torch.ops.vtk_kernels.norm_backward(gh, *ctx.saved_tensors, ctx.rms)
    else:
        g = torch.ops.vtk_kernels.add_norm_backward(gy, gh, *ctx.saved_tensors, ctx.rms)
    assert g is not None
    partials, bias = ctx.like  # `needs_input_grad` ends before arguments left at their defaults
    gx: Tensor | None = g
    if ctx.repeats:
        gx = g.sum(0, keepdim=True, dtype=accumulator(g.dtype)).to(g.dtype) if ctx.needs_input_grad[0] else None
    return (
        gx,
        g if partials is None else None,
        None,
        None if partials is None else g.to(partials[0]).expand(partials[1]),
        None if bias is None else g.flatten(0, -2).sum(0, dtype=accumulator(g.dtype)).to(bias[0]),
        None,
    )


_add_norm_op.register_autograd(_backward, setup_context=_setup)


def add_norm(
    x: Tensor,
    r: Tensor | None,
    eps: float,
    partials: Tensor | None = None,
    bias: Tensor | None = None,
    rms: bool = False,
    *,
    use_triton: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add ``r`` to ``x`` and normalise the sum: residual and the norm (no weight, no bias) that follows.

    Args:
        x: (..., C), floating point; may be strided; or (1, ..., C), a table added to every image of ``r`` (B, ..., C).
        r: (..., C), the type of ``x``; None with ``partials``.
        eps: added to the variance, or to the mean square.
        partials: (S, ..., C) of `splitk_linear`, fp32 (fp64 for fp64); summed over S in ascending order to give r.
        bias: (C,), added to the sum of ``partials``; any floating type.
        rms: RMSNorm in place of LayerNorm.
        use_triton: None for the kernel on CUDA in fp16 and bf16; False for torch; True for the kernel, no gradient.

    Returns:
        y: (..., C), x + r, contiguous, the shape of r and the type of ``x``.
        x_hat: (..., C), the norm of y before rounding, contiguous, the type of ``x``.
        rstd: (...), 1/√(variance + eps), or 1/√(mean square + eps), in fp32 (fp64 for fp64). No gradient flows
            through it.

    Raises:
        ValueError: shapes or types that do not fit, or ``use_triton=True`` where no kernel can run.
    """
    _check(x, r, partials, bias)
    way = route(x, use_triton, r, partials, bias)
    if way == "reference":
        return add_norm_ref(x, r, eps, partials, bias, rms)
    run = torch.ops.vtk_kernels.add_norm if way == "operator" else _add_norm_launch
    return run(x, r, eps, partials, bias, rms)


def _shape(r: Tensor | None, partials: Tensor | None) -> torch.Size:
    """Return the shape of the sum: that of r, given or summed; the one of ``x`` may repeat."""
    if r is not None:
        return r.shape
    assert partials is not None
    return partials.shape[1:]


def _fits(x: Tensor, shape: torch.Size) -> bool:
    table = x.ndim > 1 and x.shape[0] == 1 and len(shape) == x.ndim
    return shape == x.shape or (table and shape[1:] == x.shape[1:])


def _check(x: Tensor, r: Tensor | None, partials: Tensor | None, bias: Tensor | None) -> None:
    check_channels(x)
    if (r is None) == (partials is None):
        raise ValueError(f"give one of `r` and `partials`, not {'neither' if r is None else 'both'}")
    if r is not None and (not _fits(x, r.shape) or r.dtype != x.dtype):
        raise ValueError(
            f"`r` is {tuple(r.shape)} {r.dtype}; it must be like `x`, {tuple(x.shape)} {x.dtype}: expand or cast it"
        )
    if partials is not None:
        wide = accumulator(x.dtype)
        if partials.ndim == 0 or len(partials) == 0 or not _fits(x, partials.shape[1:]) or partials.dtype != wide:
            raise ValueError(
                f"`partials` is {tuple(partials.shape)} {partials.dtype}; it must be (S, *{tuple(x.shape)}) {wide} "
                "with S ≥ 1, as `splitk_linear` returns it"
            )
    if bias is not None and (partials is None or bias.shape != x.shape[-1:]):
        raise ValueError(
            f"`bias` is {tuple(bias.shape)}; it must be ({x.shape[-1]},) and stand beside `partials`; "
            "add it to `r` otherwise"
        )
