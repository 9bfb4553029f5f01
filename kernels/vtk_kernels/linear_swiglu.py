"""Gated linear layer in one matrix product (fc1 of a SwiGLU MLP), optionally with what its gradient needs in 8 bits.

    (g | v) = x · wᵀ + b, or rstd(row_stats, eps) ⊙ (x · wᵀ) + b,    y = SiLU(g) ⊙ v,    SiLU(g) = g / (1 + exp(−g))

SwiGLU: Shazeer, GLU Variants Improve Transformer, 2020; SiLU: Elfwing, Uchibe, Doya, 2018. The rows of w are those of
the gate, then those of the value; a program multiplies a tile of x by 64 of each and gates in registers, so that g and
v never reach memory. With statistics of the rows of x it holds the rest of a folded norm in front, for inference; the
statistics of y are for the folded norm that follows in EVA-02 (see `row_stats`). `linear_swiglu_backward` is the
gradient through a frozen w from the 8 bits (see `_glu_codes`).
Elements moved: reads x once per column of tiles and w once per row of tiles (cached), writes T · F, with statistics
2 S a row in fp32, and for the gradient 2 T · F bytes and 2 S a row in fp32.
"""

from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk_kernels._dispatch import LAUNCHES, accumulator, inference, route, runs_kernel
from vtk_kernels._glu_codes import encode_ref
from vtk_kernels._matmul import check_linear
from vtk_kernels._rows import aligned_rows
from vtk_kernels._swiglu_kernel import launch
from vtk_kernels.linear import pre_activation
from vtk_kernels.linear_swiglu_backward import linear_swiglu_backward
from vtk_kernels.row_stats import check_row_stats, pieces_of, row_stats_ref

__all__ = ["linear_swiglu", "linear_swiglu_backward", "linear_swiglu_ref"]

LAUNCHES["linear_swiglu"] = 1
LAUNCHES["linear_swiglu_folded"] = 1
LAUNCHES["linear_swiglu_save"] = 1
LAUNCHES["linear_swiglu_stats"] = 1

Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


def linear_swiglu_ref(
    x: Tensor, w: Tensor, b: Tensor | None, *, row_stats: Tensor | None = None, eps: float | None = None,
    rms: bool = False, stats: bool = False, save_grad: bool = False,
) -> Result:  # fmt: skip
    """Compute `linear_swiglu` by torch. Same arguments and results."""
    gate, value = pre_activation(x, w, b, row_stats, eps, rms).chunk(2, -1)
    y = (F.silu(gate) * value).to(x.dtype)
    if stats:
        return y, row_stats_ref(y)
    return (y, *_factors(gate, value)) if save_grad else y


def _factors(gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    wide = accumulator(gate.dtype)
    g, v = gate.detach().to(wide), value.detach().to(wide)
    sigmoid = torch.sigmoid(g)
    factors = v * sigmoid * (1 + g * (1 - sigmoid)), g * sigmoid
    codes, scales = zip(*(encode_ref(f) for f in factors), strict=True)
    return torch.cat(codes, -1), torch.stack(scales, -1)


def _linear_swiglu_launch(
    x: Tensor, w: Tensor, b: Tensor | None, *, row_stats: Tensor | None = None, eps: float | None = None,
    rms: bool = False, stats: bool = False, save_grad: bool = False,
) -> Result:  # fmt: skip
    y, y_stats, q, scales = launch(x, w, b, row_stats, eps, rms, stats, save_grad)
    if y_stats is not None:
        return y, y_stats
    return y if q is None or scales is None else (y, q, scales)


def _run(x: Tensor, *args: Any, **options: Any) -> Any:
    found = (_linear_swiglu_launch if runs_kernel(x) else linear_swiglu_ref)(x, *args, **options)
    y, *others = (found,) if isinstance(found, Tensor) else found
    stored = y.new_empty(y.shape) if options.get("save_grad") else aligned_rows(y, y.shape)
    if y.stride() != stored.stride():
        y = stored.copy_(y)
    return (y, *(t.contiguous() for t in others)) if others else y


@torch.library.custom_op("vtk_kernels::linear_swiglu", mutates_args=())
def _op(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    _check(x, w, b)
    y: Tensor = _run(x, w, b)
    return y


@torch.library.custom_op("vtk_kernels::linear_swiglu_save", mutates_args=())
def _save_op(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, w, b)
    y, q, scales = _run(x, w, b, save_grad=True)
    return y, q, scales


@torch.library.custom_op("vtk_kernels::linear_swiglu_folded", mutates_args=())
def _folded_op(x: Tensor, w: Tensor, b: Tensor | None, row_stats: Tensor, eps: float, rms: bool) -> Tensor:
    _check(x, w, b, row_stats, eps, rms)
    y: Tensor = _run(x, w, b, row_stats=row_stats, eps=eps, rms=rms)
    return y


@torch.library.custom_op("vtk_kernels::linear_swiglu_stats", mutates_args=())
def _stats_op(
    x: Tensor, w: Tensor, b: Tensor | None, row_stats: Tensor | None, eps: float | None, rms: bool
) -> tuple[Tensor, Tensor]:
    _check(x, w, b, row_stats, eps, rms)
    y, stats = _run(x, w, b, row_stats=row_stats, eps=eps, rms=rms, stats=True)
    return y, stats


def _empty(x: Tensor, w: Tensor) -> Tensor:
    return aligned_rows(x, (*x.shape[:-1], w.shape[0] // 2))


def _empty_pieces(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], pieces_of(w.shape[0] // 2), 2), dtype=accumulator(x.dtype))


@_op.register_fake
def _(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return _empty(x, w)


@_save_op.register_fake
def _(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    q = x.new_empty((*x.shape[:-1], w.shape[0]), dtype=torch.uint8)
    return x.new_empty((*x.shape[:-1], w.shape[0] // 2)), q, _empty_pieces(x, w)


@_folded_op.register_fake
def _(x: Tensor, w: Tensor, b: Tensor | None, row_stats: Tensor, eps: float, rms: bool) -> Tensor:
    return _empty(x, w)


@_stats_op.register_fake
def _(
    x: Tensor, w: Tensor, b: Tensor | None, row_stats: Tensor | None, eps: float | None, rms: bool
) -> tuple[Tensor, Tensor]:
    return _empty(x, w), _empty_pieces(x, w)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, gy: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    x, w, b = ctx.saved_tensors
    wants = ctx.needs_input_grad
    gate, value = F.linear(x, w, b).chunk(2, -1)
    gu = torch.cat([torch.ops.aten.silu_backward(gy * value, gate), gy * F.silu(gate)], -1)
    gb = gu.flatten(0, -2).sum(0, dtype=accumulator(gu.dtype)).to(b.dtype) if wants[2] else None
    gx = gu @ w if wants[0] else None
    gw = gu.flatten(0, -2).T @ x.flatten(0, -2) if wants[1] else None
    return gx, gw, gb


_op.register_autograd(_backward, setup_context=_setup)
_save_op.register_autograd(_backward, setup_context=_setup)


@overload
def linear_swiglu(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    *,
    row_stats: Tensor | None = None,
    eps: float | None = None,
    rms: bool = False,
    stats: Literal[False] = False,
    save_grad: Literal[False] = False,
    use_triton: bool | None = None,
) -> Tensor: ...
@overload
def linear_swiglu(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    *,
    row_stats: Tensor | None = None,
    eps: float | None = None,
    rms: bool = False,
    stats: Literal[True],
    save_grad: Literal[False] = False,
    use_triton: bool | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_swiglu(
    x: Tensor, w: Tensor, b: Tensor | None, *, save_grad: Literal[True], use_triton: bool | None = None
) -> tuple[Tensor, Tensor, Tensor]: ...
def linear_swiglu(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    *,
    row_stats: Tensor | None = None,
    eps: float | None = None,
    rms: bool = False,
    stats: bool = False,
    save_grad: bool = False,
    use_triton: bool | None = None,
) -> Result:
    """Multiply ``x`` by ``w``ᵀ, add ``b``, and gate the second half of the result by SiLU of the first.

    The gradient of y is exact: the backward computes the product again from ``x``. With ``row_stats`` or ``stats`` the
    kernel has none: where one is wanted torch computes, through the statistics too.

    Args:
        x: (..., K), floating point; may be strided.
        w: (2 F, K), the type of ``x``: the weight of `nn.Linear`, F rows of the gate, then F rows of the value.
        b: (2 F,), the type of ``x``, in the same order; or None.
        row_stats: (..., S, 2) of the rows of ``x``, S = ceil(K / 64), fp32 (fp64 for fp64), whose 1/√(variance + eps)
            scales x · wᵀ before the bias; or None. See `vtk_kernels.row_stats`.
        eps: added to the variance, or to the mean square; with ``row_stats`` alone.
        rms: scale by 1/√(mean square + eps), which is RMSNorm's; with ``row_stats`` alone.
        stats: also return the statistics of the rows of y, for a norm behind it; not with ``save_grad``.
        save_grad: also return q and its scales; not with ``row_stats``.
        use_triton: None: the kernel on CUDA in fp16 and bf16; False: torch; True: the kernel, with no gradient.

    Returns:
        y: (..., F), the type of ``x``; contiguous with ``save_grad`` and where F is a multiple of 16. Else the kernel
            leaves a gap behind each row, so that all start where the copy engine can move them. With ``stats`` also:
        row_stats: (..., ceil(F / 64), 2) of the rows of y as stored, fp32 (fp64 for fp64). With ``save_grad`` also:
        q: (..., 2 F), uint8, for `linear_swiglu_backward`: codes of v · SiLU′(g), then of SiLU(g).
        scales: (..., ceil(F / 64), 2), fp32 (fp64 for fp64), of both. No gradient flows through q and scales.

    Raises:
        ValueError: shapes or types that do not fit, or ``use_triton=True`` where no kernel can run.
    """
    _check(x, w, b, row_stats, eps, rms)
    if save_grad and (stats or row_stats is not None):
        raise ValueError("`save_grad` is for training, `row_stats` and `stats` are for inference: give one of them")
    way = route(x, use_triton, w, b, row_stats)
    if stats or row_stats is not None:
        way = inference(way, x, w, b, row_stats)
    if way != "operator":
        run = linear_swiglu_ref if way == "reference" else _linear_swiglu_launch
        return run(x, w, b, row_stats=row_stats, eps=eps, rms=rms, stats=stats, save_grad=save_grad)
    ops = torch.ops.vtk_kernels
    if stats:
        return ops.linear_swiglu_stats(x, w, b, row_stats, eps, rms)
    if row_stats is not None:
        return ops.linear_swiglu_folded(x, w, b, row_stats, eps, rms)
    return ops.linear_swiglu_save(x, w, b) if save_grad else ops.linear_swiglu(x, w, b)


def _check(
    x: Tensor, w: Tensor, b: Tensor | None, row_stats: Tensor | None = None, eps: float | None = None,
    rms: bool = False,
) -> None:  # fmt: skip
    check_linear(x, w, b)
    check_row_stats(x, row_stats, eps, rms)
    if w.shape[0] % 2:
        raise ValueError(f"`w` has {w.shape[0]} rows; it must have an even number: F of the gate, then F of the value")
