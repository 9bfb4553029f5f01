"""One linear layer of many tasks kept as factors: shared weights and each group's own low-rank change, in one product.

    z = as of `grouped_low_rank`
    y[r] = x[r] · wᵀ + y_scale · Σⱼ z[r, j] · b[j] + bias[group of r],    0 where r belongs to no group

The sums of a tile begin with its group's change, so that y is written once and never read: `grouped_low_rank` behind a
product of its own reads and writes it once more, but leaves the product to the library and its tiles to no group. Which
is faster is a choice ("grouped_low_rank": "separate" or "epilogue"). In int8 b is rounded to the type of x with its
scales in it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk_kernels._dispatch import LAUNCHES, inference, opaque, route, runs_kernel
from vtk_kernels._low_rank_linear_kernel import launch
from vtk_kernels._tile_map import runs
from vtk_kernels.grouped_low_rank import check_factors, grouped_low_rank_ref

__all__ = ["low_rank_linear", "low_rank_linear_ref"]

LAUNCHES["low_rank_linear"] = 2


def low_rank_linear_ref(
    x: Tensor,
    w: Tensor,
    a: Tensor,
    b: Tensor,
    spans: Tensor,
    tile_map: Tensor,
    rank: int,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """Compute `low_rank_linear` by torch. Same arguments, result and errors as of `grouped_low_rank_ref`."""
    y = F.linear(x, w)
    grouped_low_rank_ref(y, x, a, b, spans, tile_map, rank, bias, scale, x_scale, y_scale)
    parts, row = [], 0
    for _, first, last in runs(tile_map, len(x), len(spans)):
        parts += [y.new_zeros(first - row, y.shape[1]), y[first:last]]
        row = last
    return torch.cat([*parts, y.new_zeros(len(x) - row, y.shape[1])])


@torch.library.custom_op("vtk_kernels::low_rank_linear", mutates_args=())
def _op(
    x: Tensor,
    w: Tensor,
    a: Tensor,
    b: Tensor,
    spans: Tensor,
    tile_map: Tensor,
    rank: int,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    _check(x, w, a, b, spans, tile_map, rank, bias, scale, x_scale, y_scale)
    run = launch if runs_kernel(x) else low_rank_linear_ref
    return run(x, w, a, b, spans, tile_map, rank, bias, scale, x_scale, y_scale)


@_op.register_fake
def _(
    x: Tensor,
    w: Tensor,
    a: Tensor,
    b: Tensor,
    spans: Tensor,
    tile_map: Tensor,
    rank: int,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


def low_rank_linear(
    x: Tensor,
    w: Tensor,
    a: Tensor,
    b: Tensor,
    spans: Tensor,
    tile_map: Tensor,
    rank: int,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    y_scale: Tensor | None = None,
    *,
    use_triton: bool | None = None,
) -> Tensor:
    """Multiply each row of ``x`` by shared weights and its group's low-rank change of them.

    The kernels are for inference: where a gradient is wanted, torch computes it.

    Args:
        x: (T, K), floating point; may be strided.
        w: (F, K), the type of ``x``.
        a: as of `grouped_low_rank`.
        b: likewise.
        spans: likewise.
        tile_map: likewise.
        rank: likewise.
        bias: likewise.
        scale: likewise.
        x_scale: likewise.
        y_scale: likewise.
        use_triton: likewise.

    Returns:
        (T, F), contiguous, the type of ``x``; rows that no tile covers are zero.

    Raises:
        ValueError: shapes or types that do not fit, or ``use_triton=True`` where no kernel can run.
    """
    operands = (x, w, a, b, spans, tile_map, rank, bias, scale, x_scale, y_scale)
    _check(*operands)
    floating = x, w, bias, *((a, b) if a.is_floating_point() else ())
    way = inference(opaque(route(x, use_triton, *floating), x, use_triton), *floating)
    if way == "reference":
        return low_rank_linear_ref(*operands)
    return (torch.ops.vtk_kernels.low_rank_linear if way == "operator" else launch)(*operands)


def _check(
    x: Tensor,
    w: Tensor,
    a: Tensor,
    b: Tensor,
    spans: Tensor,
    tile_map: Tensor,
    rank: int,
    bias: Tensor | None,
    scale: Tensor | None,
    x_scale: Tensor | None,
    y_scale: Tensor | None,
) -> None:
    if w.ndim != 2 or w.shape[1] != x.shape[-1] or w.dtype != x.dtype:
        raise ValueError(
            f"`w` is {tuple(w.shape)} {w.dtype}; it must be (F, {x.shape[-1]}) {x.dtype}, the weight of a linear layer"
        )
    check_factors(x, len(w), a, b, spans, tile_map, rank, bias, scale, x_scale, y_scale)
