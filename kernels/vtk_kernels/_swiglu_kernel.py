"""Kernel of `linear_swiglu`: a matrix product whose programs take a tile of the gate and of the value at a time.

A tile has 64 columns of y, a piece of its rows' statistics, and two sums: of 64 rows of w from the gate's half and of
the 64 that belong to them from the value's. A tile of x is read once for both, and together they are a product of 128
columns, whose tiles, stages and programs a multiprocessor are those of `_linear_kernel`. Not measured yet.
"""

from typing import no_type_check

import torch
from torch import Tensor

from vtk_kernels._device import ahead, chained, fetch, follow, is_hopper
from vtk_kernels._dispatch import on_device
from vtk_kernels._gelu import reciprocal
from vtk_kernels._glu_codes import encode
from vtk_kernels._matmul import GROUP, gated_tile_config, has_tensor_map, in_tiles, tensor_map, tile_of, tile_options
from vtk_kernels._resident import programs as resident_programs
from vtk_kernels._resident import registers
from vtk_kernels._rows import aligned_rows, as_rows, contiguous
from vtk_kernels._triton import tl, triton
from vtk_kernels.row_stats import MANY, load_rstd, pieces_of, store_piece


@triton.jit
@no_type_check
def sigmoid(g):
    """Return 1 / (1 + exp(−g))."""
    return reciprocal(1.0 + tl.exp2(g * -1.4426950408889634))


@triton.jit
@no_type_check
def _mapped_products(
    x_map, w_map, tile_row, gate_row, value_row, K,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return x · wᵀ of a tile for two tiles of rows of w, as `mapped_product` does."""
    gate = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
    value = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
    for start in range(0, K, BLOCK_K):
        x = x_map.load([tile_row, start])
        gate = tl.dot(x, w_map.load([gate_row, start]).T, gate)
        value = tl.dot(x, w_map.load([value_row, start]).T, value)
    return gate, value


@triton.jit
@no_type_check
def _products(
    x_ptr, gate_ptr, value_ptr, x_mask, w_mask, K,
    EVEN_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return x · wᵀ of a tile for two tiles of rows of w, as `product` does."""
    step = tl.arange(0, BLOCK_K)
    gate = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
    value = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptr, mask=x_mask, other=0.0)
            w_gate = tl.load(gate_ptr, mask=w_mask, other=0.0)
            w_value = tl.load(value_ptr, mask=w_mask, other=0.0)
        else:
            inside = start + step < K
            x = tl.load(x_ptr, mask=x_mask & inside[None, :], other=0.0)
            w_gate = tl.load(gate_ptr, mask=w_mask & inside[:, None], other=0.0)
            w_value = tl.load(value_ptr, mask=w_mask & inside[:, None], other=0.0)
        gate = tl.dot(x, w_gate, gate, input_precision="ieee")
        value = tl.dot(x, w_value, value, input_precision="ieee")
        x_ptr += BLOCK_K
        gate_ptr += BLOCK_K
        value_ptr += BLOCK_K
    return gate, value


@triton.jit(do_not_specialize=["T", "programs"])  # they differ from batch to batch
@no_type_check
def _swiglu_kernel(
    y_ptr,  # out (T, F); with TMA the tensor map of its tiles
    y_stats_ptr,  # out (T, ceil(F / 64), 2), fp32: row statistics of y; or None
    q_ptr,  # out (T, 2 F), uint8: codes of the factors of gate and value; or None
    q_scale_ptr,  # out (T, ceil(F / 64), 2), fp32, beside it
    x_ptr,  # (T, K); with TMA its tensor map
    w_ptr,  # (2 F, K); likewise
    b_ptr,  # (2 F,), or None
    x_stats_ptr,  # (T, ceil(K / 64), 2), fp32: row statistics of x; or None
    ahead_ptr,  # (2 F, K): w, to be fetched before the wait; or None
    stride_yt,  # from a row of y to the next
    stride_xt,  # of x
    stride_wf,  # of w
    stride_st,  # of x_stats
    T,
    F,
    K,
    eps,
    programs,
    PIECES: tl.constexpr,  # of a row of x
    RMS: tl.constexpr,  # its norm is RMSNorm
    LATE: tl.constexpr,  # statistics of x are read behind the sums, and the loop over tiles is flattened; with TMA
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,  # columns of a piece
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    if ahead_ptr is not None:
        fetch(ahead_ptr, 2 * F * K, tl.program_id(0), programs)
        if b_ptr is not None:
            fetch(b_ptr, 2 * F, tl.program_id(0), programs)
    follow(PDL)
    tiles = tl.cdiv(T, BLOCK_T) * tl.cdiv(F, BLOCK_F)
    for tile in tl.range(tl.program_id(0), tiles, programs, flatten=LATE):
        tile_t, tile_f = tile_of(tile, T, F, BLOCK_T, BLOCK_F, GROUP)
        tile_row = tile_t * BLOCK_T
        tile_out = tile_f * BLOCK_F
        row = (tile_row + tl.arange(0, BLOCK_T)).to(tl.int64)
        out = tile_out + tl.arange(0, BLOCK_F)
        inside = out < F
        mask = (row < T)[:, None] & inside[None, :]
        scale = None
        if x_stats_ptr is not None and not LATE:  # the sums, once there, leave no registers for it
            scale = load_rstd(x_stats_ptr, stride_st, row, T, K, eps, PIECES, 8, RMS)
        if TMA:  # past F a tile of the gate holds rows of the value, for columns that are not stored
            gate, value = _mapped_products(x_ptr, w_ptr, tile_row, tile_out, F + tile_out, K, BLOCK_T, BLOCK_F, BLOCK_K)
            if x_stats_ptr is not None and LATE:
                scale = load_rstd(x_stats_ptr, stride_st, row, T, K, eps, PIECES, 0, RMS)
        else:
            step = tl.arange(0, BLOCK_K)
            gate_ptr = w_ptr + (out.to(tl.int64) * stride_wf)[None, :] + step[:, None]
            gate, value = _products(
                x_ptr + (row * stride_xt)[:, None] + step[None, :],
                gate_ptr,
                gate_ptr + F.to(tl.int64) * stride_wf,
                (row < T)[:, None],
                inside[None, :],
                K,
                EVEN_K,
                BLOCK_T,
                BLOCK_F,
                BLOCK_K,
            )
        if scale is not None:
            gate *= scale[:, None]
            value *= scale[:, None]
        if b_ptr is not None:
            gate += tl.load(b_ptr + out, mask=inside, other=0.0).to(tl.float32)[None, :]
            value += tl.load(b_ptr + F + out, mask=inside, other=0.0).to(tl.float32)[None, :]
        sigma = sigmoid(gate)
        silu = gate * sigma
        y = silu * value
        if TMA:
            y = y.to(y_ptr.dtype)
            y_ptr.store([tile_row, tile_out], y)
        else:
            y = y.to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + (row * stride_yt)[:, None] + out[None, :], y, mask=mask)
        if y_stats_ptr is not None:
            kept = tl.where(inside[None, :], y.to(tl.float32), 0.0)
            width = tl.minimum(F - tile_out, BLOCK_F)
            store_piece(y_stats_ptr, kept, row, T, tile_f, tl.cdiv(F, BLOCK_F), width)
        if q_ptr is not None:
            at = q_ptr + (row * 2 * F)[:, None] + out[None, :]
            scale_at = q_scale_ptr + (row * tl.cdiv(F, BLOCK_F) + tile_f) * 2
            slope = value * sigma * (1.0 + gate * (1.0 - sigma))
            codes, scales = encode(tl.where(inside[None, :], slope, 0.0))
            tl.store(at, codes, mask=mask)
            tl.store(scale_at, scales, mask=row < T)
            codes, scales = encode(tl.where(inside[None, :], silu, 0.0))
            tl.store(at + F, codes, mask=mask)
            tl.store(scale_at + 1, scales, mask=row < T)


def launch(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    row_stats: Tensor | None = None,
    eps: float | None = None,
    rms: bool = False,
    stats: bool = False,
    save_grad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Start the kernel; arguments as of `linear_swiglu`.

    Returns:
        y: (..., F), as of `aligned_rows`; contiguous with ``save_grad``.
        y_stats: (..., ceil(F / 64), 2), fp32; None without ``stats``.
        q: (..., 2 F), uint8; None without ``save_grad``.
        scales: like y_stats; None without ``save_grad``.
    """
    lead, features = x.shape[:-1], w.shape[0] // 2
    y = x.new_empty((*lead, features)) if save_grad else aligned_rows(x, (*lead, features))
    shape = (*lead, pieces_of(features), 2)
    y_stats = torch.empty(shape, dtype=torch.float32, device=x.device) if stats else None
    q = torch.empty((*lead, 2 * features), dtype=torch.uint8, device=x.device) if save_grad else None
    scales = torch.empty(shape, dtype=torch.float32, device=x.device) if save_grad else None
    a, weight, flat = as_rows(x), as_rows(w), as_rows(y)
    rows, size = a.shape
    known = None if row_stats is None else as_rows(row_stats.flatten(-2))
    pieces = 0 if known is None else pieces_of(size)
    tma = is_hopper(x) and has_tensor_map(a, weight, flat)
    config = gated_tile_config(tma, rows, features, stats or save_grad, a, weight, flat)
    block_t, block_f, block_k, warps, _ = config
    if y.numel():
        tiles = triton.cdiv(rows, block_t) * triton.cdiv(features, block_f)
        programs = min(tiles, resident_programs("_swiglu_kernel", x)) if tma else tiles
        options = chained(x, programs)
        with on_device(x):
            _swiglu_kernel[(programs,)](
                tensor_map(flat, block_t, block_f) if tma else y,
                y_stats,
                q,
                scales,
                in_tiles(a, tma, block_t, block_k),
                in_tiles(weight, tma, block_f, block_k),
                contiguous(b),
                known,
                ahead(options, rows, weight),
                flat.stride(0),
                a.stride(0),
                weight.stride(0),
                0 if known is None else known.stride(0),
                rows,
                features,
                size,
                float(eps or 0.0),
                programs,
                PIECES=pieces,
                RMS=rms,
                LATE=tma and pieces <= (MANY // 2 if stats else MANY),
                GROUP=GROUP,
                **tile_options(tma, size, config),
                maxnreg=registers("_swiglu_kernel", warps, x) if tma else None,
                **options,
            )
    return y, y_stats, q, scales
