"""One linear layer whose weights depend on the row: packed rows of many tasks, each run of rows with its own weights.

    y[r] = row_scale[r] · (x[r] · w[group of r]ᵀ) + b[group of r],    0 where r belongs to no group

Which rows a program takes stands in a tile map on the device, so that one CUDA graph serves every mix of tasks: no
length is known on the host. Tiles are in the order of groups, so that a group's weights are read from memory once and
found in the L2 cache by its other tiles. One program owns one tile and BLOCK_F columns; it also writes the zeros
between its tile and the next. Elements moved: reads x once per column of tiles and w once per tile (cached), writes
T · F; the gradient of w reads g and x once per column and row of tiles and writes G · F · K.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vtk_kernels._dispatch import LAUNCHES, accumulator, opaque, route, runs_kernel
from vtk_kernels._grouped_kernels import backward_launch, launch
from vtk_kernels._matmul import check_row_scale
from vtk_kernels._rows import check_channels
from vtk_kernels._tile_map import make_tile_map, runs

__all__ = ["grouped_linear", "grouped_linear_ref", "make_tile_map"]

LAUNCHES["grouped_linear"] = 1
LAUNCHES["grouped_linear_backward"] = 1


def grouped_linear_ref(
    x: Tensor, w: Tensor, b: Tensor | None, tile_map: Tensor, row_scale: Tensor | None = None
) -> Tensor:
    """Compute `grouped_linear` by torch, one product per group. Same arguments and result.

    Raises:
        ValueError: tiles that do not ascend inside the rows of ``x`` and the groups of ``w``.
    """
    row, parts = 0, []
    for group, first, last in runs(tile_map, len(x), len(w)):
        y = F.linear(x[first:last], w[group])
        if row_scale is not None:
            y = y * row_scale[first:last, None]
        y = y if b is None else y + b[group]
        parts += [x.new_zeros(first - row, w.shape[1]), y.to(x.dtype)]
        row = last
    return torch.cat([*parts, x.new_zeros(len(x) - row, w.shape[1])])


def grouped_linear_backward_ref(
    g: Tensor, x: Tensor, tile_map: Tensor, groups: int, row_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of weights and biases by torch.

    Args:
        g: (T, F), gradient of y.
        x: (T, K).
        tile_map: (3, tiles).
        groups: G.
        row_scale: (T,), or None.

    Returns:
        gw: (G, F, K), the type of ``x``.
        gb: (G, F), likewise.
    """
    gw, gb = x.new_zeros(groups, g.shape[1], x.shape[1]), x.new_zeros(groups, g.shape[1])
    scaled = x if row_scale is None else (x * row_scale[:, None]).to(x.dtype)
    for group, first, last in runs(tile_map, len(x), groups):
        gw[group] = g[first:last].T @ scaled[first:last]
        gb[group] = g[first:last].sum(0, dtype=accumulator(g.dtype))
    return gw, gb


@torch.library.custom_op("vtk_kernels::grouped_linear", mutates_args=())
def _op(x: Tensor, w: Tensor, b: Tensor | None, tile_map: Tensor, row_scale: Tensor | None = None) -> Tensor:
    _check(x, w, b, tile_map, row_scale)
    return (launch if runs_kernel(x) else grouped_linear_ref)(x, w, b, tile_map, row_scale)


@_op.register_fake
def _(x: Tensor, w: Tensor, b: Tensor | None, tile_map: Tensor, row_scale: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


@torch.library.custom_op("vtk_kernels::grouped_linear_backward", mutates_args=())
def _backward_op(
    g: Tensor, x: Tensor, tile_map: Tensor, groups: int, row_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return (backward_launch if runs_kernel(x) else grouped_linear_backward_ref)(g, x, tile_map, groups, row_scale)


@_backward_op.register_fake
def _(g: Tensor, x: Tensor, tile_map: Tensor, groups: int, row_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return x.new_empty(groups, g.shape[1], x.shape[1]), x.new_empty(groups, g.shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, tile_map, row_scale = inputs
    ctx.save_for_backward(x, w, tile_map, row_scale)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, w, tile_map, row_scale = ctx.saved_tensors
    wants = ctx.needs_input_grad
    folded = row_scale is not None and wants[4]  # an argument left to its default has no place in `wants`
    gx = gw = gb = gs = None
    if wants[0] or folded:  # the same product with the matrices transposed
        raw = torch.ops.vtk_kernels.grouped_linear(g, w.transpose(1, 2), None, tile_map)
        gs = (x.to(row_scale.dtype) * raw).sum(-1) if folded else None
        gx = raw if row_scale is None else (raw * row_scale[:, None]).to(x.dtype)
    if wants[1] or wants[2]:
        gw, gb = torch.ops.vtk_kernels.grouped_linear_backward(g, x, tile_map, w.shape[0], row_scale)
    return gx, gw, gb if wants[2] else None, None, gs


_op.register_autograd(_backward, setup_context=_setup)


def grouped_linear(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    tile_map: Tensor,
    row_scale: Tensor | None = None,
    *,
    use_triton: bool | None = None,
) -> Tensor:
    """Multiply each row of ``x`` by the weights of its group.

    Args:
        x: (T, K), floating point; may be strided.
        w: (G, F, K), the type of ``x``.
        b: (G, F), the type of ``x``; or None.
        tile_map: (3, tiles) int32 on the device of ``x``, from `make_tile_map`: tiles must ascend. Its values are not
            checked on CUDA: that would wait for the device.
        row_scale: (T,), fp32 (fp64 for fp64), times x · wᵀ before the bias; or None.
        use_triton: None: the kernel on CUDA in fp16 and bf16; False: torch, which waits for the device; True: the
            kernel, with no gradient.

    Returns:
        (T, F), contiguous, the type of ``x``; rows that no tile covers are zero.

    Raises:
        ValueError: shapes or types that do not fit, or ``use_triton=True`` where no kernel can run.
    """
    _check(x, w, b, tile_map, row_scale)
    way = opaque(route(x, use_triton, w, b, row_scale), x, use_triton)
    if way == "reference":
        return grouped_linear_ref(x, w, b, tile_map, row_scale)
    return (torch.ops.vtk_kernels.grouped_linear if way == "operator" else launch)(x, w, b, tile_map, row_scale)


def _check(x: Tensor, w: Tensor, b: Tensor | None, tile_map: Tensor, row_scale: Tensor | None) -> None:
    check_channels(x)
    if x.ndim != 2:
        raise ValueError(f"`x` is {tuple(x.shape)}; it must be (T, K), the packed rows of all groups")
    if w.ndim != 3 or w.shape[2] != x.shape[1] or w.dtype != x.dtype:
        raise ValueError(
            f"`w` is {tuple(w.shape)} {w.dtype}; it must be (G, F, {x.shape[1]}) {x.dtype}, a linear weight per group"
        )
    if b is not None and (b.shape != w.shape[:2] or b.dtype != x.dtype):
        raise ValueError(f"`b` is {tuple(b.shape)} {b.dtype}; it must be {tuple(w.shape[:2])} {x.dtype}, or None")
    if tile_map.ndim != 2 or tile_map.shape[0] != 3 or tile_map.dtype != torch.int32:
        raise ValueError(
            f"`tile_map` is {tuple(tile_map.shape)} {tile_map.dtype}; it must be (3, tiles) torch.int32, "
            "as `make_tile_map` gives it"
        )
    if tile_map.device != x.device:
        raise ValueError(f"`tile_map` is on {tile_map.device}; it must be on the device of `x`, {x.device}")
    check_row_scale(x, row_scale)
