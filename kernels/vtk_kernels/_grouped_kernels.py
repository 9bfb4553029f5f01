"""Kernels of `grouped_linear`: the product, and the gradients of the weights and biases of each group."""

from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._device import is_hopper
from vtk_kernels._dispatch import on_device
from vtk_kernels._matmul import aligned, has_tensor_map, in_tiles, mapped_product, product, tensor_map, tile_options
from vtk_kernels._resident import registers
from vtk_kernels._rows import as_rows, contiguous
from vtk_kernels._triton import tl, triton


@triton.jit(do_not_specialize=["tiles", "T"])  # they differ from batch to batch
@no_type_check
def _grouped_linear_kernel(
    y_ptr,  # out (T, F)
    x_ptr,  # (T, K); with TMA the tensor map of its tiles
    w_ptr,  # (G, F, K); with TMA that of (G · F, K)
    b_ptr,  # (G, F), or None
    row_scale_ptr,  # (T,), fp32; or None
    map_ptr,  # (3, tiles), int32: group, first row, row end
    stride_xt,  # from a row of x to the next
    stride_wg,  # from a group of w to the next
    stride_wf,  # from a row
    stride_wk,  # from a column
    tiles,
    T,
    F,
    K,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    columns = tl.cdiv(F, BLOCK_F)
    tile = tl.program_id(0) // columns
    first_out = tl.program_id(0) % columns * BLOCK_F
    out = first_out + tl.arange(0, BLOCK_F)
    group = tl.load(map_ptr + tile).to(tl.int64)
    first = tl.load(map_ptr + tiles + tile)
    last = tl.load(map_ptr + 2 * tiles + tile)
    step = tl.arange(0, BLOCK_K)
    local = tl.arange(0, BLOCK_T)
    if group >= 0:
        if not TMA:
            w_tile_ptr = w_ptr + group * stride_wg
            w_tile_ptr += (out.to(tl.int64) * stride_wf)[None, :] + (step.to(tl.int64) * stride_wk)[:, None]
        for start in range(first, last, BLOCK_T):  # once, unless the map's block is longer than BLOCK_T
            row = (start + local).to(tl.int64)
            if TMA:  # rows and columns of others may come along: they are not stored
                w_row = (group * F).to(tl.int32) + first_out
                y = mapped_product(x_ptr, w_ptr, start, w_row, 0, K, BLOCK_T, BLOCK_F, BLOCK_K)
            else:
                y = product(
                    x_ptr + (row * stride_xt)[:, None] + step[None, :],
                    w_tile_ptr,
                    (row < last)[:, None],
                    (out < F)[None, :],
                    K,
                    1,
                    stride_wk,
                    EVEN_K,
                    BLOCK_T,
                    BLOCK_F,
                    BLOCK_K,
                )
            if row_scale_ptr is not None:
                y *= tl.load(row_scale_ptr + row, mask=row < last, other=0.0).to(tl.float32)[:, None]
            if b_ptr is not None:
                y += tl.load(b_ptr + group * F + out, mask=out < F, other=0.0).to(tl.float32)[None, :]
            mask = (row < last)[:, None] & (out < F)[None, :]
            tl.store(y_ptr + (row * F)[:, None] + out[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)

    # rows between this tile and the next belong to nobody: zeros; the first tile takes those before it too
    after = tl.load(map_ptr + tiles + tile + 1, mask=tile + 1 < tiles, other=T)
    blank = tl.zeros([BLOCK_T, BLOCK_F], y_ptr.dtype.element_ty)
    for start in range(last, after, BLOCK_T):
        row = (start + local).to(tl.int64)
        mask = (row < after)[:, None] & (out < F)[None, :]
        tl.store(y_ptr + (row * F)[:, None] + out[None, :], blank, mask=mask)
    if tile == 0:
        for start in range(0, first, BLOCK_T):
            row = (start + local).to(tl.int64)
            mask = (row < first)[:, None] & (out < F)[None, :]
            tl.store(y_ptr + (row * F)[:, None] + out[None, :], blank, mask=mask)


@triton.jit(do_not_specialize=["tiles", "T"])  # they differ from batch to batch
@no_type_check
def _grouped_linear_backward_kernel(
    gw_ptr,  # out (G, F, K)
    gb_ptr,  # out (G, F)
    g_ptr,  # (T, F)
    x_ptr,  # (T, K)
    row_scale_ptr,  # (T,), fp32; or None
    map_ptr,  # (3, tiles), int32
    stride_gt,  # from a row of g to the next
    stride_xt,  # of x
    tiles,
    T,
    F,
    K,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_MAP: tl.constexpr,
):
    columns = tl.cdiv(K, BLOCK_K)
    blocks = tl.cdiv(F, BLOCK_F) * columns
    group = (tl.program_id(0) // blocks).to(tl.int64)
    out = tl.program_id(0) % blocks // columns * BLOCK_F + tl.arange(0, BLOCK_F)
    k = tl.program_id(0) % columns * BLOCK_K + tl.arange(0, BLOCK_K)

    # a group's tiles follow each other: its rows run from its least first row to its greatest end
    first = tl.full((), T, tl.int32)
    last = tl.full((), 0, tl.int32)
    for start in range(0, tiles, BLOCK_MAP):
        tile = start + tl.arange(0, BLOCK_MAP)
        mine = tl.load(map_ptr + tile, mask=tile < tiles, other=-1) == group
        first = tl.minimum(first, tl.min(tl.load(map_ptr + tiles + tile, mask=mine, other=T), 0))
        last = tl.maximum(last, tl.max(tl.load(map_ptr + 2 * tiles + tile, mask=mine, other=0), 0))

    local = tl.arange(0, BLOCK_T)
    gw = tl.zeros([BLOCK_F, BLOCK_K], tl.float32)
    gb = tl.zeros([BLOCK_F], tl.float32)
    for start in range(first, last, BLOCK_T):
        row = (start + local).to(tl.int64)
        there = row < last
        g_mask = there[None, :] & (out < F)[:, None]
        g = tl.load(g_ptr + (row * stride_gt)[None, :] + out[:, None], mask=g_mask, other=0.0)
        x_mask = there[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + (row * stride_xt)[:, None] + k[None, :], mask=x_mask, other=0.0)
        gb += tl.sum(g.to(tl.float32), 1)
        if row_scale_ptr is not None:
            scale = tl.load(row_scale_ptr + row, mask=there, other=0.0).to(tl.float32)
            x = (x.to(tl.float32) * scale[:, None]).to(x_ptr.dtype.element_ty)
        gw = tl.dot(g, x, gw, input_precision="ieee")
    mask = (out < F)[:, None] & (k < K)[None, :]
    at = (group * F + out)[:, None] * K + k[None, :]
    tl.store(gw_ptr + at, gw.to(gw_ptr.dtype.element_ty), mask=mask)
    if tl.program_id(0) % columns == 0:
        tl.store(gb_ptr + group * F + out, gb.to(gb_ptr.dtype.element_ty), mask=out < F)


def _config(rows: int, tiles: int, *operands: Tensor) -> tuple[int, int, int, int, int]:
    """Return (BLOCK_T, BLOCK_F, BLOCK_K, num_warps, num_stages), BLOCK_T near the block that the map was made with.

    The map is on the device, but its length is known: tiles of 64 rows hold at most 64 on average.
    """
    if operands[0].element_size() > 2:
        return 32, 32, 32, 4, 2
    if rows <= 16 * tiles:
        return 16, 64, 64, 4, 4
    if not aligned(*operands):
        return 64, 32, 32, 4, 2
    return 128 if rows > 64 * tiles else 64, 128, 64, 8, 3


def launch(x: Tensor, w: Tensor, b: Tensor | None, tile_map: Tensor, row_scale: Tensor | None = None) -> Tensor:
    """Start the kernel of `grouped_linear`; arguments and result as there."""
    rows, features, size = x.shape[0], w.shape[1], w.shape[2]
    tiles = tile_map.shape[1]
    if tiles == 0:
        return torch.zeros(rows, features, dtype=x.dtype, device=x.device)
    y = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    a = as_rows(x)
    weight = w if 1 in w.stride()[1:] else w.contiguous()
    flat = weight.view(-1, size) if weight.is_contiguous() else None
    tma = is_hopper(x) and flat is not None and has_tensor_map(a, flat)
    block_t, block_f, block_k, warps, stages = _config(rows, tiles, a, weight)
    if y.numel():
        with on_device(x):
            _grouped_linear_kernel[(tiles * triton.cdiv(features, block_f),)](
                y,
                in_tiles(a, tma, block_t, block_k),
                tensor_map(flat, block_f, block_k) if tma and flat is not None else weight,
                contiguous(b),
                contiguous(row_scale),
                tile_map.contiguous(),
                a.stride(0),
                *weight.stride(),
                tiles,
                rows,
                features,
                size,
                **tile_options(tma, size, (block_t, block_f, block_k, warps, stages)),
                maxnreg=registers("_grouped_linear_kernel", warps, x) if tma else None,
            )
    return y


def backward_launch(
    g: Tensor, x: Tensor, tile_map: Tensor, groups: int, row_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Start the kernel of the gradients of weights and biases; arguments as in `grouped_linear_backward_ref`."""
    features, size, tiles = g.shape[1], x.shape[1], tile_map.shape[1]
    gw = torch.empty(groups, features, size, dtype=x.dtype, device=x.device)
    gb = torch.empty(groups, features, dtype=x.dtype, device=x.device)
    grad, a = as_rows(g), as_rows(x)
    block = 64 if aligned(grad, a) and a.element_size() == 2 else 32
    blocks = triton.cdiv(features, block) * triton.cdiv(size, block)
    if gw.numel():
        with on_device(x):
            _grouped_linear_backward_kernel[(groups * blocks,)](
                gw,
                gb,
                grad,
                a,
                contiguous(row_scale),
                tile_map.contiguous(),
                grad.stride(0),
                a.stride(0),
                tiles,
                x.shape[0],
                features,
                size,
                BLOCK_T=block,
                BLOCK_F=block,
                BLOCK_K=block,
                BLOCK_MAP=256,
                num_warps=4,
                num_stages=3,
            )
    return gw, gb
