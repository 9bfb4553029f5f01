"""Kernel of `low_rank_linear`: a product with shared weights whose sums begin with each group's own change."""

from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._device import is_hopper
from vtk_kernels._dispatch import on_device
from vtk_kernels._low_rank_kernels import UNIT, shrink
from vtk_kernels._matmul import aligned, has_tensor_map, in_tiles, mapped_product, product, tile_options
from vtk_kernels._resident import registers
from vtk_kernels._rows import as_rows, contiguous
from vtk_kernels._triton import tl, triton

_UNIT = tl.constexpr(UNIT)


@triton.jit(do_not_specialize=["tiles", "T"])  # they differ from batch to batch
@no_type_check
def _low_rank_linear_kernel(
    y_ptr,  # out (T, F)
    x_ptr,  # (T, K); with TMA the tensor map of its tiles
    w_ptr,  # (F, K); with TMA likewise
    z_ptr,  # (T, R); of a row only its group's columns are read
    b_ptr,  # (N, F), the type of x or int8
    y_scale_ptr,  # (F,), fp32; or None
    bias_ptr,  # (G, F), or None
    spans_ptr,  # (G, 2), int32: first row of b, rank
    map_ptr,  # (3, tiles), int32: group, first row, row end
    stride_xt,  # from a row of x to the next
    stride_wf,  # of w
    stride_zt,  # of z
    tiles,
    T,
    F,
    K,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    columns = tl.cdiv(F, BLOCK_F)
    tile = tl.program_id(0) // columns
    first_out = tl.program_id(0) % columns * BLOCK_F
    out = first_out + tl.arange(0, BLOCK_F)
    group = tl.load(map_ptr + tile).to(tl.int64)
    first = tl.load(map_ptr + tiles + tile)
    last = tl.load(map_ptr + 2 * tiles + tile)
    local = tl.arange(0, BLOCK_T)
    step = tl.arange(0, BLOCK_K)
    if group >= 0:
        begin = tl.load(spans_ptr + 2 * group)
        rank = tl.load(spans_ptr + 2 * group + 1)
        column = tl.arange(0, BLOCK_R)
        for start in range(first, last, BLOCK_T):  # once, unless the map's block is longer than BLOCK_T
            row = (start + local).to(tl.int64)
            total = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
            if bias_ptr is not None:
                total += tl.load(bias_ptr + group * F + out, mask=out < F, other=0.0).to(tl.float32)[None, :]
            for r in range(0, rank, BLOCK_R):
                there = r + column < rank
                z_tile_ptr = z_ptr + (row * stride_zt)[:, None] + (r + column)[None, :]
                z = tl.load(z_tile_ptr, mask=(row < last)[:, None] & there[None, :], other=0.0)
                b_tile_ptr = b_ptr + ((begin + r + column).to(tl.int64) * F)[:, None] + out[None, :]
                b = tl.load(b_tile_ptr, mask=there[:, None] & (out < F)[None, :], other=0)
                if b_ptr.dtype.element_ty == tl.int8:
                    b = b.to(tl.float32) * (1.0 / _UNIT)
                if y_scale_ptr is not None:
                    b = b.to(tl.float32) * tl.load(y_scale_ptr + out, mask=out < F, other=0.0)[None, :]
                total = tl.dot(z, b.to(z_ptr.dtype.element_ty), total, input_precision="ieee")
            if TMA:  # rows and columns of others may come along: they are not stored
                y = mapped_product(x_ptr, w_ptr, start, first_out, 0, K, BLOCK_T, BLOCK_F, BLOCK_K, total)
            else:
                y = product(
                    x_ptr + (row * stride_xt)[:, None] + step[None, :],
                    w_ptr + (out.to(tl.int64) * stride_wf)[None, :] + step[:, None],
                    (row < last)[:, None],
                    (out < F)[None, :],
                    K,
                    1,
                    1,
                    EVEN_K,
                    BLOCK_T,
                    BLOCK_F,
                    BLOCK_K,
                    total,
                )
            mask = (row < last)[:, None] & (out < F)[None, :]
            tl.store(y_ptr + (row * F)[:, None] + out[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)

    # rows between this tile and the next belong to nobody: zeros; the first tile takes those before it too
    after = tl.load(map_ptr + tiles + tile + 1, mask=tile + 1 < tiles, other=T)
    before = tl.where(tile == 0, first, 0)
    blank = tl.zeros([BLOCK_T, BLOCK_F], y_ptr.dtype.element_ty)
    for start in range(last, after, BLOCK_T):
        row = (start + local).to(tl.int64)
        mask = (row < after)[:, None] & (out < F)[None, :]
        tl.store(y_ptr + (row * F)[:, None] + out[None, :], blank, mask=mask)
    for start in range(0, before, BLOCK_T):
        row = (start + local).to(tl.int64)
        mask = (row < before)[:, None] & (out < F)[None, :]
        tl.store(y_ptr + (row * F)[:, None] + out[None, :], blank, mask=mask)


def _config(rows: int, tiles: int, mapped: bool, *operands: Tensor) -> tuple[int, int, int, int, int]:
    """Return (BLOCK_T, BLOCK_F, BLOCK_K, num_warps, num_stages), as `grouped_linear` has them.

    Where threads hold addresses, tiles of 64 rows: of 128 they would not fit beside the sums.
    """
    if operands[0].element_size() > 2:
        return 32, 32, 32, 4, 2
    if rows <= 16 * tiles:
        return 16, 64, 64, 4, 4
    if not aligned(*operands):
        return 32, 32, 32, 4, 2
    return 128 if mapped and rows > 64 * tiles else 64, 128, 64, 8, 3


def launch(
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
    """Start the kernels of `low_rank_linear`; arguments and result as there."""
    (rows, size), features, tiles = x.shape, w.shape[0], tile_map.shape[1]
    if tiles == 0:
        return torch.zeros(rows, features, dtype=x.dtype, device=x.device)
    y = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    inputs, weight = as_rows(x), w.contiguous()
    wide = aligned(inputs, weight, a, b)
    z = shrink(x, a, spans, tile_map, rank, scale, x_scale, wide)
    tma = is_hopper(x) and has_tensor_map(inputs, weight)
    block_t, block_f, block_k, warps, stages = _config(rows, tiles, tma, inputs, weight, b)
    if y.numel():
        with on_device(x):
            _low_rank_linear_kernel[(tiles * triton.cdiv(features, block_f),)](
                y,
                in_tiles(inputs, tma, block_t, block_k),
                in_tiles(weight, tma, block_f, block_k),
                z,
                b.contiguous(),
                contiguous(y_scale),
                contiguous(bias),
                spans.contiguous(),
                tile_map.contiguous(),
                inputs.stride(0),
                weight.stride(0),
                z.stride(0),
                tiles,
                rows,
                features,
                size,
                BLOCK_R=16,  # sums of the product leave few registers beside them
                **tile_options(tma, size, (block_t, block_f, block_k, warps, stages)),
                maxnreg=registers("_low_rank_linear_kernel", warps, x) if tma else None,
            )
    return y
