"""Low-rank change of a linear layer that depends on the row: packed rows of many tasks, each with its own factors.

    z[r, j] = scale[j] · Σₖ x[r, k] · x_scale[k] · a[j, k],    j over the rows of a and b that belong to r's group
    y[r] += y_scale · Σⱼ z[r, j] · b[j] + bias[group of r],    y[r] stays where r belongs to no group

The product with the weights that all groups share is one matrix product for all rows, made before; what a group has of
its own is thin (S-LoRA, Sheng et al. 2024; Punica, Chen et al. 2024). Factors of all groups lie in one arena, of any
ranks, 0 included: a group is a span of its rows. Spans and tile map are on the device, so that one CUDA graph serves
every mix of tasks, and tasks added later to rows that were free. In int8 factors count in parts of 128; shared vectors
(γ of the norm in front, LayerScale) then stand beside them, since they cannot be folded into codes.

z is rounded to the type of x, so that both products run on matrix units: its error, 2⁻⁹ of the change in bf16, is below
that of y, 2⁻⁹ of the whole, as long as the change is smaller than what it changes. Sums are in fp32. Elements moved:
reads x once and y once, writes y once; z, T · R each way, and the factors, once a tile, are found in the L2 cache.
"""

import torch
from torch import Tensor

from vtk_kernels._dispatch import LAUNCHES, accumulator, inference, opaque, route, runs_kernel
from vtk_kernels._low_rank_kernels import UNIT, launch
from vtk_kernels._rows import check_channels
from vtk_kernels._tile_map import make_tile_map, runs

__all__ = ["UNIT", "grouped_low_rank", "grouped_low_rank_ref", "make_tile_map"]

LAUNCHES["grouped_low_rank"] = 2


def grouped_low_rank_ref(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    spans: Tensor,
    tile_map: Tensor,
    rank: int,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    y_scale: Tensor | None = None,
) -> None:
    """Compute `grouped_low_rank` by torch, two products per group. Same arguments and result.

    Raises:
        ValueError: tiles that do not ascend inside the rows of ``x``, or spans outside ``a`` or above ``rank``.
    """
    wide, unit = accumulator(x.dtype), 1 if a.dtype == x.dtype else UNIT
    bounds = spans.tolist()
    for group, first, last in runs(tile_map, len(x), len(spans)):
        begin, count = bounds[group]
        if not (0 <= begin and 0 <= count <= rank and begin + count <= len(a)):
            raise ValueError(
                f"`spans` has {count} rows from row {begin} on for group {group}; a span must lie inside the {len(a)} "
                f"rows of `a` and have at most `rank` ({rank})"
            )
        mine = slice(begin, begin + count)
        of_a = a[mine].to(wide) if x_scale is None else (a[mine] * x_scale).to(x.dtype).to(wide)
        z = x[first:last].to(wide) @ of_a.T / unit
        z = (z if scale is None else z * scale[mine]).to(x.dtype).to(wide)
        change = z @ b[mine].to(wide) / unit
        change = change if y_scale is None else change * y_scale
        change = change if bias is None else change + bias[group].to(wide)
        y[first:last] = (y[first:last].to(wide) + change).to(y.dtype)


@torch.library.custom_op("vtk_kernels::grouped_low_rank", mutates_args=("y",))
def _op(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    spans: Tensor,
    tile_map: Tensor,
    rank: int,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    y_scale: Tensor | None = None,
) -> None:
    _check(y, x, a, b, spans, tile_map, rank, bias, scale, x_scale, y_scale)
    run = launch if runs_kernel(x) else grouped_low_rank_ref
    run(y, x, a, b, spans, tile_map, rank, bias, scale, x_scale, y_scale)


@_op.register_fake
def _(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    spans: Tensor,
    tile_map: Tensor,
    rank: int,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    y_scale: Tensor | None = None,
) -> None:
    return None


def grouped_low_rank(
    y: Tensor,
    x: Tensor,
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
) -> None:
    """Add to each row of ``y`` what its group's factors make of its row of ``x``; in place.

    The kernels are for inference: where a gradient is wanted, torch computes it.

    Args:
        y: (T, F), floating point, neighbouring columns side by side: the product with the shared weights.
        x: (T, K), the type of ``y``; may be strided.
        a: (N, K), rows of all groups; the type of ``x``, or int8, which counts in parts of 128.
        b: (N, F), the same rows of the other factors; the type of ``a``.
        spans: (G, 2) int32 on the device of ``x``: first row and rank of each group, inside ``a``. As those of the
            tile map, its values are not checked on CUDA.
        tile_map: (3, tiles) int32, from `make_tile_map`: tiles must ascend.
        rank: largest rank of any group.
        bias: (G, F), the type of ``x``; or None.
        scale: (N,), fp32 (fp64 for fp64), of each row of ``a``; or None.
        x_scale: (K,), likewise, of each column of ``a``; or None.
        y_scale: (F,), likewise, of each column of ``b``; or None.
        use_triton: None: the kernels on CUDA in fp16 and bf16; False: torch, which waits for the device; True: the
            kernels.

    Raises:
        ValueError: shapes or types that do not fit, or ``use_triton=True`` where no kernel can run.
    """
    operands = (y, x, a, b, spans, tile_map, rank, bias, scale, x_scale, y_scale)
    _check(*operands)
    floating = y, x, bias, *((a, b) if a.is_floating_point() else ())
    way = inference(opaque(route(x, use_triton, *floating), x, use_triton), *floating)
    if way == "operator":
        torch.ops.vtk_kernels.grouped_low_rank(*operands)
    else:
        (launch if way == "launcher" else grouped_low_rank_ref)(*operands)


def _check(
    y: Tensor,
    x: Tensor,
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
    features = y.shape[-1] if y.ndim else 0
    check_factors(x, features, a, b, spans, tile_map, rank, bias, scale, x_scale, y_scale)
    if y.ndim != 2 or len(y) != len(x) or y.dtype != x.dtype or (y.shape[1] > 1 and y.stride(1) != 1):
        raise ValueError(
            f"`y` is {tuple(y.shape)} {y.dtype}, strides {y.stride()}; it must be ({len(x)}, F) {x.dtype}, "
            "neighbouring columns side by side"
        )


def check_factors(
    x: Tensor,
    features: int,
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
    """Refuse operands of `grouped_low_rank` that do not fit ``x`` and F ``features``.

    Raises:
        ValueError: names the operand.
    """
    check_channels(x)
    if x.ndim != 2:
        raise ValueError(f"`x` is {tuple(x.shape)}; it must be (T, K), the packed rows of all groups")
    if a.ndim != 2 or a.shape[1] != x.shape[1] or a.dtype not in (x.dtype, torch.int8):
        raise ValueError(
            f"`a` is {tuple(a.shape)} {a.dtype}; it must be (N, {x.shape[1]}) {x.dtype} or torch.int8, the factors of "
            "all groups"
        )
    if b.shape != (len(a), features) or b.dtype != a.dtype:
        raise ValueError(f"`b` is {tuple(b.shape)} {b.dtype}; it must be ({len(a)}, {features}) {a.dtype}")
    for name, value, width in (("spans", spans, 2), ("tile_map", tile_map, 3)):
        axis = 1 if name == "spans" else 0
        if value.ndim != 2 or value.shape[axis] != width or value.dtype != torch.int32 or value.device != x.device:
            shape = "(G, 2)" if name == "spans" else "(3, tiles)"
            raise ValueError(
                f"`{name}` is {tuple(value.shape)} {value.dtype} on {value.device}; it must be {shape} torch.int32 "
                f"on the device of `x`, {x.device}"
            )
    if rank < 0:
        raise ValueError(f"`rank` ({rank}) must not be negative: it is the largest of all groups")
    if bias is not None and (bias.shape != (len(spans), features) or bias.dtype != x.dtype):
        raise ValueError(
            f"`bias` is {tuple(bias.shape)} {bias.dtype}; it must be ({len(spans)}, {features}) {x.dtype}, or None"
        )
    wide = accumulator(x.dtype)
    vectors = {"scale": (scale, len(a)), "x_scale": (x_scale, x.shape[1]), "y_scale": (y_scale, features)}
    for name, (vector, length) in vectors.items():
        if vector is not None and (vector.shape != (length,) or vector.dtype != wide):
            raise ValueError(
                f"`{name}` is {tuple(vector.shape)} {vector.dtype}; it must be ({length},) {wide}, or None"
            )
