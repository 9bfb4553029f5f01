"""Matrix product x · wᵀ in K slices, for batches too small to fill the device with output tiles.

    partials[s] = x[:, slice s] · w[:, slice s]ᵀ      (fp32; `add_norm` sums them in ascending order and adds the bias)

At batch 1 the (197, K) · (K, 384) products of a ViT-S have 24 tiles of 64 × 64 for over 100 multiprocessors; S slices
make 24 S. No atomics: the same bits every time. One program owns one tile of one slice. A slice is ceil(K / S) long,
rounded up to 128, two of the copies' steps; the last ones may be shorter or empty (zeros).
Elements moved: reads x and w once per tile column and row (cached), writes S · T · F in fp32.
"""

from typing import Any, no_type_check

import torch
from torch import Tensor

from vtk_kernels._device import ahead, chained, fetch, follow, is_hopper
from vtk_kernels._dispatch import LAUNCHES, accumulator, on_device, route, runs_kernel
from vtk_kernels._matmul import (
    GROUP,
    PROGRAMS,
    check_linear,
    default_splits,
    has_tensor_map,
    in_tiles,
    mapped_product,
    product,
    slice_length,
    tile_config,
    tile_of,
    tile_options,
)
from vtk_kernels._rows import as_rows
from vtk_kernels._triton import tl, triton

__all__ = ["default_splits", "splitk_linear", "splitk_linear_ref"]

LAUNCHES["splitk_linear"] = 1


def splitk_linear_ref(x: Tensor, w: Tensor, splits: int) -> Tensor:
    """Compute `splitk_linear` by torch. Same arguments and result."""
    wide = accumulator(x.dtype)
    a, b = x.to(wide), w.to(wide)
    return torch.stack([a[..., k] @ b[:, k].T for k in _slices(x.shape[-1], splits)])


def _slices(size: int, splits: int) -> list[slice]:
    length = slice_length(size, splits)
    return [slice(min(s * length, size), min((s + 1) * length, size)) for s in range(splits)]


@triton.jit
@no_type_check
def _splitk_linear_kernel(
    partials_ptr,  # out (splits, T, F), fp32
    x_ptr,  # (T, K); with TMA the tensor map of its tiles
    w_ptr,  # (F, K); likewise
    ahead_ptr,  # (F, K): w, to be fetched before the wait; or None
    stride_xt,  # from a row of x to the next
    stride_wf,  # of w
    T,
    F,
    K,
    length,  # columns of a slice, a multiple of BLOCK_K
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if ahead_ptr is not None:
        programs = tl.num_programs(0) * tl.num_programs(1)
        fetch(ahead_ptr, F * K, tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), programs)
    follow(PDL)
    tile_t, tile_f = tile_of(tl.program_id(0), T, F, BLOCK_T, BLOCK_F, GROUP)
    row = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    out = tile_f * BLOCK_F + tl.arange(0, BLOCK_F)
    split = tl.program_id(1)
    first = split * length
    if TMA:
        last = tl.minimum(first + length, K)
        total = mapped_product(x_ptr, w_ptr, tile_t * BLOCK_T, tile_f * BLOCK_F, first, last, BLOCK_T, BLOCK_F, BLOCK_K)
    else:
        step = first + tl.arange(0, BLOCK_K)
        total = product(
            x_ptr + row.to(tl.int64)[:, None] * stride_xt + step[None, :],
            w_ptr + out.to(tl.int64)[None, :] * stride_wf + step[:, None],
            (row < T)[:, None],
            (out < F)[None, :],
            tl.minimum(length, K - first),
            1,
            1,
            EVEN_K,
            BLOCK_T,
            BLOCK_F,
            BLOCK_K,
        )
    at = (split.to(tl.int64) * T + row)[:, None] * F + out[None, :]
    tl.store(partials_ptr + at, total, mask=(row < T)[:, None] & (out < F)[None, :])


def _splitk_linear_launch(x: Tensor, w: Tensor, splits: int) -> Tensor:
    partials = torch.empty((splits, *x.shape[:-1], w.shape[0]), dtype=torch.float32, device=x.device)
    a, b = as_rows(x), as_rows(w)
    (rows, size), features = a.shape, b.shape[0]
    tma = is_hopper(x) and has_tensor_map(a, b)
    if tma:
        block_t, block_f, block_k, warps = 16 if rows <= 16 else 64, 64, 128, 4
        # with one program a multiprocessor there is room for a fourth stage
        stages = 4 if triton.cdiv(rows, block_t) * triton.cdiv(features, block_f) * splits <= PROGRAMS else 3
    else:
        block_t, block_f, block_k, warps, stages = tile_config(rows, features, a, b)
    tiles = triton.cdiv(rows, block_t) * triton.cdiv(features, block_f)
    if partials.numel():
        options = chained(x, tiles * splits)
        with on_device(x):
            _splitk_linear_kernel[(tiles, splits)](
                partials,
                in_tiles(a, tma, block_t, block_k),
                in_tiles(b, tma, block_f, block_k),
                ahead(options, rows, b),
                a.stride(0),
                b.stride(0),
                rows,
                features,
                size,
                slice_length(size, splits),
                GROUP=GROUP,
                **tile_options(tma, size, (block_t, block_f, block_k, warps, stages)),
                **options,
            )
    return partials


@torch.library.custom_op("vtk_kernels::splitk_linear", mutates_args=())
def _op(x: Tensor, w: Tensor, splits: int) -> Tensor:
    _check(x, w, splits)
    return _splitk_linear_launch(x, w, splits) if runs_kernel(x) else splitk_linear_ref(x, w, splits)


@_op.register_fake
def _(x: Tensor, w: Tensor, splits: int) -> Tensor:
    return x.new_empty((splits, *x.shape[:-1], w.shape[0]), dtype=accumulator(x.dtype))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _ = inputs
    ctx.save_for_backward(x, w)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, w = ctx.saved_tensors
    parts = list(zip(g.to(x.dtype), _slices(x.shape[-1], len(g)), strict=True))
    gx = torch.cat([part @ w[:, k] for part, k in parts], -1) if ctx.needs_input_grad[0] else None
    gw = None
    if ctx.needs_input_grad[1]:
        gw = torch.cat([part.flatten(0, -2).T @ x[..., k].flatten(0, -2) for part, k in parts], -1)
    return gx, gw, None


_op.register_autograd(_backward, setup_context=_setup)


def splitk_linear(x: Tensor, w: Tensor, splits: int, *, use_triton: bool | None = None) -> Tensor:
    """Multiply ``x`` by ``w``ᵀ in slices of K whose sum, taken by `add_norm`, is the product.

    Args:
        x: (..., K), floating point; may be strided.
        w: (F, K), the type of ``x``: the weight of `nn.Linear`.
        splits: slices of K, at least 1.
        use_triton: None for the kernel on CUDA in fp16 and bf16; False for torch; True for the kernel, no gradient.

    Returns:
        (splits, ..., F), contiguous, fp32 (fp64 for fp64).

    Raises:
        ValueError: shapes or types that do not fit, or ``use_triton=True`` where no kernel can run.
    """
    _check(x, w, splits)
    way = route(x, use_triton, w)
    if way == "reference":
        return splitk_linear_ref(x, w, splits)
    return (
        torch.ops.vtk_kernels.splitk_linear(x, w, splits) if way == "operator" else _splitk_linear_launch(x, w, splits)
    )


def _check(x: Tensor, w: Tensor, splits: int) -> None:
    check_linear(x, w, None)
    if splits < 1:
        raise ValueError(f"`splits` ({splits}) must be at least 1")
