"""Linear layer, residual addition and the statistics of the sum's rows in one product (inference).

    y = x + a · wᵀ + b,    stats: mean and M2 of each 64 channels of a row of y as stored
    y = x + rstd(row_stats, eps) ⊙ (a · wᵀ) + b    with statistics of the rows of a: behind a folded sub-norm

A tile of y holds whole pieces of 64 columns: bias, residual and statistics need nothing of another tile. The product
that reads y next takes LayerNorm's 1/σ from them (`linear`, `linear_gelu`), so that no kernel of its own normalises.
At few rows K can be cut into slices, a program each, of which the last to come finishes its tile: still one kernel, and
the same bits every time (`_residual_kernel`). Elements moved: reads a and w once per column and row of tiles (cached)
and T · C of x; writes T · C, and 2 S a row in fp32. Slices write and read T · C in fp32 besides, each, in the L2 cache.
"""

import torch
from torch import Tensor

from vtk_kernels import _linear_kernel, _residual_kernel
from vtk_kernels._device import capability
from vtk_kernels._dispatch import LAUNCHES, accumulator, inference, route, runs_kernel
from vtk_kernels._matmul import check_linear
from vtk_kernels._residual_kernel import counters_needed
from vtk_kernels.linear import pre_activation
from vtk_kernels.row_stats import check_row_stats, pieces_of, row_stats_ref

LAUNCHES["linear_residual"] = 1

_BLACKWELL = 10
"""Compute capability from which nothing is cut: compiled for it the kernel of slices spills 64 bytes a thread."""


def linear_residual_ref(
    a: Tensor, w: Tensor, b: Tensor | None, x: Tensor, splits: int = 1, counters: Tensor | None = None,
    row_stats: Tensor | None = None, eps: float | None = None, rms: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `linear_residual` by torch. Same arguments and results; slices and counters change nothing."""
    y = (x + pre_activation(a, w, b, row_stats, eps, rms)).to(x.dtype)
    return y, row_stats_ref(y)


def _linear_residual_launch(
    a: Tensor, w: Tensor, b: Tensor | None, x: Tensor, splits: int = 1, counters: Tensor | None = None,
    row_stats: Tensor | None = None, eps: float | None = None, rms: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if splits > 1 and capability(a) < _BLACKWELL:
        assert counters is not None
        return _residual_kernel.launch(a, w, b, x, splits, counters, row_stats, eps, rms)
    y, _, stats = _linear_kernel.launch(a, w, b, residual=x, row_stats=row_stats, eps=eps, rms=rms)
    assert stats is not None
    return y, stats


@torch.library.custom_op("vtk_kernels::linear_residual", mutates_args=())
def _op(
    a: Tensor, w: Tensor, b: Tensor | None, x: Tensor, splits: int = 1, counters: Tensor | None = None,
    row_stats: Tensor | None = None, eps: float | None = None, rms: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(a, w, b, x, splits, counters)
    check_row_stats(a, row_stats, eps, rms)
    run = _linear_residual_launch if runs_kernel(a) else linear_residual_ref
    y, stats = run(a, w, b, x, splits, counters, row_stats, eps, rms)
    return y.contiguous(), stats.contiguous()


@_op.register_fake
def _(
    a: Tensor, w: Tensor, b: Tensor | None, x: Tensor, splits: int = 1, counters: Tensor | None = None,
    row_stats: Tensor | None = None, eps: float | None = None, rms: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    channels = w.shape[0]
    stats = x.new_empty((*x.shape[:-1], pieces_of(channels), 2), dtype=accumulator(x.dtype))
    return x.new_empty(x.shape), stats


def linear_residual(
    a: Tensor,
    w: Tensor,
    b: Tensor | None,
    x: Tensor,
    splits: int = 1,
    counters: Tensor | None = None,
    row_stats: Tensor | None = None,
    eps: float | None = None,
    rms: bool = False,
    *,
    use_triton: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiply ``a`` by ``w``ᵀ, add ``b`` and ``x``, and take the statistics of the sum's rows.

    The kernel has no gradient: where one is wanted torch computes, through the statistics too.

    Args:
        a: (..., K), floating point; may be strided.
        w: (C, K), the type of ``a``: the weight of `nn.Linear`.
        b: (C,), the type of ``a``; or None.
        x: (..., C), the type of ``a``: the residual stream; may be strided.
        splits: slices of K, a program each; 1 for none, see `vtk_kernels._matmul.default_splits`.
        counters: (n,), int32, all 0, and 0 again when the kernel has ended; with ``splits`` above 1, n at least
            `counters_needed`. Calls on one stream may share them, calls that may run at the same time must not.
        row_stats: (..., S, 2) of the rows of ``a``, S = ceil(K / 64), fp32 (fp64 for fp64), whose 1/√(variance + eps)
            scales a · wᵀ before the bias and the residual: a LayerNorm of ``a`` whose weight and centring are in w; or
            None.
        eps: added to the variance, or to the mean square; with ``row_stats`` alone.
        rms: scale by 1/√(mean square + eps), which is RMSNorm's; with ``row_stats`` alone.
        use_triton: None for the kernel on CUDA in fp16 and bf16; False for torch; True for the kernel, no gradient.

    Returns:
        y: (..., C), contiguous, the type of ``a``.
        stats: (..., S, 2) of the rows of y, S = ceil(C / 64), contiguous, fp32 (fp64 for fp64): see
        `vtk_kernels.row_stats`.

    Raises:
        ValueError: shapes or types that do not fit, or ``use_triton=True`` where no kernel can run.
    """
    _check(a, w, b, x, splits, counters)
    check_row_stats(a, row_stats, eps, rms)
    way = inference(route(a, use_triton, w, b, x, row_stats), a, w, b, x, row_stats)
    if way == "reference":
        return linear_residual_ref(a, w, b, x, row_stats=row_stats, eps=eps, rms=rms)
    run = torch.ops.vtk_kernels.linear_residual if way == "operator" else _linear_residual_launch
    return run(a, w, b, x, splits, counters, row_stats, eps, rms)


def _check(a: Tensor, w: Tensor, b: Tensor | None, x: Tensor, splits: int, counters: Tensor | None) -> None:
    check_linear(a, w, b, "a")
    if x.shape != (*a.shape[:-1], w.shape[0]) or x.dtype != a.dtype:
        wanted = (*a.shape[:-1], w.shape[0])
        raise ValueError(f"`x` is {tuple(x.shape)} {x.dtype}; it must be {wanted} {a.dtype}, like a · wᵀ")
    if splits < 1:
        raise ValueError(f"`splits` ({splits}) must be at least 1")
    if splits == 1:
        return
    needed = counters_needed(a.numel() // a.shape[-1], w.shape[0])
    if counters is None:
        raise ValueError(f"`splits` ({splits}) needs `counters`: ({needed},) torch.int32, all 0, on {a.device}")
    plain = counters.ndim == 1 and counters.dtype == torch.int32 and counters.is_contiguous()
    if not plain or counters.shape[0] < needed or counters.device != a.device:
        raise ValueError(
            f"`counters` is {tuple(counters.shape)} {counters.dtype} on {counters.device}; it must be at least "
            f"({needed},) torch.int32 on {a.device}, all 0"
        )
