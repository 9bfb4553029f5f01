"""Start of the fp32 sums of a matrix product's tile, and the work on them before they are stored."""

from typing import no_type_check

from vtk_kernels._gelu import gelu, gelu_byte
from vtk_kernels._triton import tl, triton
from vtk_kernels.row_stats import store_piece


@triton.jit
@no_type_check
def start_of(
    b_ptr,  # (F,), or None
    residual_ptr,  # (T, F); with TMA its tensor map
    stride_rt,  # from a row of the residual to the next
    tile_row,
    tile_out,
    T,  # 0 for a start from 0
    F,
    TMA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Return residual + bias of a tile in fp32, for a product to be added to: no pass of its own, and no epilogue's.

    They are on their way while the product's first operands are, where an epilogue would wait for them alone.
    """
    row = tile_row + tl.arange(0, BLOCK_T)
    out = tile_out + tl.arange(0, BLOCK_F)
    mask = (row < T)[:, None] & (out < F)[None, :]
    if TMA:
        u = residual_ptr.load([tile_row, tile_out]).to(tl.float32)
    else:
        at = residual_ptr + (row.to(tl.int64) * stride_rt)[:, None] + out[None, :]
        u = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if b_ptr is not None:
        b = tl.load(b_ptr + out, mask=out < F, other=0.0).to(tl.float32)
        u += tl.where(mask, b[None, :], 0.0)
    return u


@triton.jit
@no_type_check
def finish(
    y_ptr,  # out (T, F); with TMA the tensor map of its tiles, here and below
    q_ptr,  # out (T, F), uint8: GELU′ of u; or None
    y_stats_ptr,  # out (T, ceil(F / 64), 2), fp32, where BLOCK_F is 64; or None
    u,  # (BLOCK_T, BLOCK_F) in fp32: the sums
    scale,  # (BLOCK_T,) in fp32, or None
    b_ptr,  # (F,), or None
    residual_ptr,  # (T, F), or None; with TMA its tensor map
    stride_rt,  # from a row of the residual to the next
    tile_row,
    tile_out,
    T,
    F,
    GELU: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Scale and shift the sums that begin at a row and a column, add the residual, apply GELU, and store."""
    row = tile_row + tl.arange(0, BLOCK_T)
    out = tile_out + tl.arange(0, BLOCK_F)
    inside = out < F
    mask = (row < T)[:, None] & inside[None, :]
    row = row.to(tl.int64)
    if scale is not None:
        u *= scale[:, None]
    if b_ptr is not None:
        u += tl.load(b_ptr + out, mask=inside, other=0.0).to(tl.float32)[None, :]
    if residual_ptr is not None:  # what lies outside is read as 0, and the sums and the bias are 0 there too
        if TMA:
            u += residual_ptr.load([tile_row, tile_out]).to(tl.float32)
        else:
            u += tl.load(residual_ptr + (row * stride_rt)[:, None] + out[None, :], mask=mask, other=0.0).to(tl.float32)
    y = u
    if GELU:
        y = gelu(u)
    at = (row * F)[:, None] + out[None, :]
    if TMA:
        y = y.to(y_ptr.dtype)
        y_ptr.store([tile_row, tile_out], y)
    else:
        y = y.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + at, y, mask=mask)
    if q_ptr is not None:
        tl.store(q_ptr + at, gelu_byte(u), mask=mask)
    if y_stats_ptr is not None:
        width = tl.minimum(F - tile_out, BLOCK_F)
        store_piece(y_stats_ptr, y.to(tl.float32), row, T, tile_out // BLOCK_F, tl.cdiv(F, BLOCK_F), width)
