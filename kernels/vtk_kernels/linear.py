"""Linear layer, optionally of rows not yet normalised: their LayerNorm in its epilogue (inference).

    y = rstd(row_stats, eps) ⊙ (x · wᵀ) + b

With a w whose rows have mean 0 and that holds LayerNorm's weight, this is the linear layer of LayerNorm(x); with a w
that holds RMSNorm's weight, and ``rms``, that of RMSNorm(x). Statistics come from the product that wrote x
(`linear_residual`), so that x is read once and its norm never written.
Elements moved: reads x and w once per column and row of tiles (cached), and 2 S a row of statistics; writes T · F.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk_kernels._dispatch import LAUNCHES, inference, route, runs_kernel
from vtk_kernels._linear_kernel import launch
from vtk_kernels._matmul import check_linear
from vtk_kernels.row_stats import check_row_stats, rstd_ref

LAUNCHES["linear"] = 1


def linear_ref(
    x: Tensor, w: Tensor, b: Tensor | None, row_stats: Tensor | None = None, eps: float | None = None,
    rms: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `linear` by torch. Same arguments and result."""
    return pre_activation(x, w, b, row_stats, eps, rms).to(x.dtype)


def pre_activation(
    x: Tensor, w: Tensor, b: Tensor | None, row_stats: Tensor | None, eps: float | None = None, rms: bool = False
) -> Tensor:
    """Compute `linear` by torch in the type of its statistics, which may be wider than that of ``x``."""
    if row_stats is None or eps is None:
        return F.linear(x, w, b)
    y = F.linear(x, w) * rstd_ref(row_stats, x.shape[-1], eps, rms)[..., None]
    return y if b is None else y + b


def _linear_launch(
    x: Tensor, w: Tensor, b: Tensor | None, row_stats: Tensor | None = None, eps: float | None = None,
    rms: bool = False,
) -> Tensor:  # fmt: skip
    return launch(x, w, b, row_stats=row_stats, eps=eps, rms=rms)[0]


@torch.library.custom_op("vtk_kernels::linear", mutates_args=())
def _op(
    x: Tensor, w: Tensor, b: Tensor | None, row_stats: Tensor | None = None, eps: float | None = None,
    rms: bool = False,
) -> Tensor:  # fmt: skip
    _check(x, w, b, row_stats, eps, rms)
    return (_linear_launch if runs_kernel(x) else linear_ref)(x, w, b, row_stats, eps, rms).contiguous()


@_op.register_fake
def _(
    x: Tensor, w: Tensor, b: Tensor | None, row_stats: Tensor | None = None, eps: float | None = None,
    rms: bool = False,
) -> Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def linear(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    row_stats: Tensor | None = None,
    eps: float | None = None,
    rms: bool = False,
    *,
    use_triton: bool | None = None,
) -> Tensor:
    """Multiply ``x`` by ``w``ᵀ, scale each row by its 1/√(variance + eps), add ``b``.

    The kernel has no gradient: where one is wanted torch computes, through the statistics too.

    Args:
        x: (..., K), floating point; may be strided.
        w: (F, K), the type of ``x``: the weight of `nn.Linear`.
        b: (F,), the type of ``x``; or None.
        row_stats: (..., S, 2) of the rows of ``x``, S = ceil(K / 64), fp32 (fp64 for fp64), see
            `vtk_kernels.row_stats`; or None for a plain linear layer.
        eps: added to the variance, or to the mean square; with ``row_stats`` alone.
        rms: scale by 1/√(mean square + eps), which is RMSNorm's; with ``row_stats`` alone.
        use_triton: None for the kernel on CUDA in fp16 and bf16; False for torch; True for the kernel, no gradient.

    Returns:
        (..., F), contiguous, the type of ``x``.

    Raises:
        ValueError: shapes or types that do not fit, or ``use_triton=True`` where no kernel can run.
    """
    _check(x, w, b, row_stats, eps, rms)
    way = inference(route(x, use_triton, w, b, row_stats), x, w, b, row_stats)
    if way == "reference":
        return linear_ref(x, w, b, row_stats, eps, rms)
    run = torch.ops.vtk_kernels.linear if way == "operator" else _linear_launch
    return run(x, w, b, row_stats, eps, rms)


def _check(x: Tensor, w: Tensor, b: Tensor | None, row_stats: Tensor | None, eps: float | None, rms: bool) -> None:
    check_linear(x, w, b)
    check_row_stats(x, row_stats, eps, rms)
