"""Linear layer, residual addition and the statistics of the sum's rows in one product (inference).

    y = x + a · wᵀ + b,    row_stats: mean and M2 of each 64 channels of a row of y as stored

A program owns a tile of y whose columns are whole pieces of 64: bias, residual and statistics need nothing of another
tile. The product that reads y next takes LayerNorm's 1/σ from them (`linear`, `linear_gelu`), so that no kernel of its
own normalises. Elements moved: reads a and w once per column and row of tiles (cached) and T · C of x; writes T · C,
and 2 S a row in fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk_kernels._dispatch import LAUNCHES, accumulator, inference, route, runs_kernel
from vtk_kernels._linear_kernel import launch
from vtk_kernels._matmul import check_linear
from vtk_kernels.row_stats import pieces_of, row_stats_ref

LAUNCHES["linear_residual"] = 1


def linear_residual_ref(a: Tensor, w: Tensor, b: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `linear_residual` by torch. Same arguments and results."""
    y = x + F.linear(a, w, b)
    return y, row_stats_ref(y)


def _linear_residual_launch(a: Tensor, w: Tensor, b: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    y, _, stats = launch(a, w, b, residual=x)
    assert stats is not None
    return y, stats


@torch.library.custom_op("vtk_kernels::linear_residual", mutates_args=())
def _op(a: Tensor, w: Tensor, b: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    _check(a, w, b, x)
    y, stats = (_linear_residual_launch if runs_kernel(a) else linear_residual_ref)(a, w, b, x)
    return y.contiguous(), stats.contiguous()


@_op.register_fake
def _(a: Tensor, w: Tensor, b: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    channels = w.shape[0]
    stats = x.new_empty((*x.shape[:-1], pieces_of(channels), 2), dtype=accumulator(x.dtype))
    return x.new_empty(x.shape), stats


def linear_residual(
    a: Tensor, w: Tensor, b: Tensor | None, x: Tensor, *, use_triton: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Multiply ``a`` by ``w``ᵀ, add ``b`` and ``x``, and take the statistics of the sum's rows.

    The kernel has no gradient: where one is wanted torch computes, through the statistics too.

    Args:
        a: (..., K), floating point; may be strided.
        w: (C, K), the type of ``a``: the weight of `nn.Linear`.
        b: (C,), the type of ``a``; or None.
        x: (..., C), the type of ``a``: the residual stream; may be strided.
        use_triton: None for the kernel on CUDA in fp16 and bf16; False for torch; True for the kernel, no gradient.

    Returns:
        y: (..., C), contiguous, the type of ``a``.
        row_stats: (..., S, 2) of the rows of y, S = ceil(C / 64), contiguous, fp32 (fp64 for fp64): see
        `vtk_kernels.row_stats`.

    Raises:
        ValueError: shapes or types that do not fit, or ``use_triton=True`` where no kernel can run.
    """
    _check(a, w, b, x)
    way = inference(route(a, use_triton, w, b, x), a, w, b, x)
    if way == "reference":
        return linear_residual_ref(a, w, b, x)
    run = torch.ops.vtk_kernels.linear_residual if way == "operator" else _linear_residual_launch
    return run(a, w, b, x)


def _check(a: Tensor, w: Tensor, b: Tensor | None, x: Tensor) -> None:
    check_linear(a, w, b, "a")
    if x.shape != (*a.shape[:-1], w.shape[0]) or x.dtype != a.dtype:
        wanted = (*a.shape[:-1], w.shape[0])
        raise ValueError(f"`x` is {tuple(x.shape)} {x.dtype}; it must be {wanted} {a.dtype}, like a · wᵀ")
