"""Launches that `_offline` compiles: what ViT-S, B and L with one and two branches give the launchers, in bf16."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vtk_kernels import _attention_kernel, _broadcast_kernels, _grouped_kernels, _short_attention
from vtk_kernels.add_norm import _add_norm_launch
from vtk_kernels.linear import _linear_launch
from vtk_kernels.linear_gelu import _linear_gelu_launch
from vtk_kernels.linear_gelu_backward import _linear_gelu_backward_launch
from vtk_kernels.linear_residual import _linear_residual_launch
from vtk_kernels.norm import _norm_launch, norm_backward_launch
from vtk_kernels.patchify import _patchify_launch
from vtk_kernels.row_stats import pieces_of
from vtk_kernels.splitk_linear import _splitk_linear_launch

SIZES = {"S": (384, 6), "B": (768, 12), "L": (1024, 16)}
"""Channels and heads."""

EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """A call of a launcher; the default test compiles the essential ones, the slow one all."""

    label: str
    launcher: Callable[..., object]
    arguments: tuple[Any, ...]
    essential: bool


def cases() -> Iterator[Case]:
    """Yield the table."""
    for label, essential, launcher, *arguments in stems():
        yield Case(label, launcher, tuple(arguments), essential)
    for size, (channels, heads) in SIZES.items():
        for made, essential in (
            *((row, size == "S") for row in row_wise(channels)),
            *((row, size == "S" and branches == 2) for branches in (1, 2) for row in products(channels, branches)),
            *((row, size == "S" and branches == 2) for branches in (1, 2) for row in attentions(heads * branches)),
        ):
            label, first, launcher, *arguments = made
            yield Case(f"{label} {size}", launcher, tuple(arguments), first and essential)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def fp32(*shape: int) -> Tensor:
    """Return a tensor without memory, for statistics."""
    return empty(*shape, dtype=torch.float32)


def row_stats(*shape: int) -> Tensor:
    """Return the statistics of rows (..., C) without memory."""
    return fp32(*shape[:-1], pieces_of(shape[-1]), 2)


def row_wise(c: int) -> Iterator[tuple[Any, ...]]:
    """Yield (label, essential, launcher, arguments…) of the kernels that normalise and broadcast."""
    x, rstd, vector = empty(8, 197, c), fp32(8, 197), empty(c)
    packed, offsets = empty(8 * 197, c), empty(9, dtype=torch.int32)
    one, partials = empty(1, 197, c), fp32(4, 1, 197, c)
    yield "norm", True, _norm_launch, x, EPS
    yield "norm bias", False, _norm_launch, x, EPS, vector
    yield "norm_backward", False, norm_backward_launch, x, x, rstd
    yield "add_norm_backward", True, norm_backward_launch, x, x, rstd, x
    yield "add_norm", True, _add_norm_launch, x, x, EPS
    yield "add_norm partials", False, _add_norm_launch, one, None, EPS, partials, vector
    yield "add_norm table", False, _add_norm_launch, one, x, EPS
    yield "add_norm table partials", False, _add_norm_launch, one, None, EPS, fp32(4, 8, 197, c), vector
    yield "context_broadcast", False, _broadcast_kernels.launch, x, x, None, None
    yield "context_broadcast stats", True, _broadcast_kernels.launch, x, x, vector, None, True
    yield "context_broadcast backward", False, _broadcast_kernels.launch, None, x, None, None
    yield "context_broadcast segments", False, _broadcast_kernels.launch, packed, packed, None, offsets


def stems() -> Iterator[tuple[Any, ...]]:
    """Yield images cut into patches, which no width of a model changes: of one grid, padded, in another order."""
    images = empty(8, 3, 224, 224)
    yield "patchify 16", True, _patchify_launch, images, (16, 16), 1, 768
    yield "patchify 14", False, _patchify_launch, images, (14, 14), 5, 592
    yield "patchify 16 384px", False, _patchify_launch, empty(8, 3, 384, 384), (16, 16), 1, 768
    nhwc = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    yield "patchify 16 channels_last", False, _patchify_launch, nhwc, (16, 16), 1, 768


def products(c: int, branches: int) -> Iterator[tuple[Any, ...]]:
    """Yield the kernels around a matrix product; `tile_config` has other tiles at batch 1, at 8 and for pooled rows."""
    hidden = 4 * c * branches
    one, eight, pooled = empty(1, 197, c), empty(8, 197, c), empty(8, 197, c)[:, 0]
    w, b, w2 = empty(hidden, c), empty(hidden), empty(c, hidden)
    p = f"×{branches}"
    yield f"linear_gelu b1 {p}", True, _linear_gelu_launch, one, w, b
    yield f"linear_gelu b8 {p}", True, _linear_gelu_launch, eight, w, b
    yield f"linear_gelu pooled {p}", False, _linear_gelu_launch, pooled, w, b
    yield f"linear_gelu stats b8 {p}", True, _linear_gelu_launch, eight, w, b, False, row_stats(8, 197, c), EPS
    yield f"linear_gelu stats b1 {p}", False, _linear_gelu_launch, one, w, b, False, row_stats(1, 197, c), EPS
    yield f"linear_gelu q b1 {p}", False, _linear_gelu_launch, one, w, b, True
    yield f"linear_gelu q b8 {p}", True, _linear_gelu_launch, eight, w, b, True
    yield f"linear_gelu K=1000 {p}", False, _linear_gelu_launch, empty(8, 197, 1000), empty(hidden, 1000), b, True
    yield f"splitk_linear K=1000 {p}", False, _splitk_linear_launch, empty(8, 197, 1000), empty(hidden, 1000), 4
    qkv, w_qkv = 3 * c * branches, empty(3 * c * branches, c)
    for batch in (1, 8, 64):
        x, o, u = (empty(batch, 197, size) for size in (c, c * branches, hidden))
        first = batch == 8
        yield f"linear b{batch} {p}", False, _linear_launch, x, w_qkv, empty(qkv)
        yield f"linear stats b{batch} {p}", first, _linear_launch, x, w_qkv, empty(qkv), row_stats(batch, 197, c), EPS
        yield (
            f"linear_residual out b{batch} {p}",
            False,
            _linear_residual_launch,
            o,
            empty(c, c * branches),
            empty(c),
            x,
        )
        yield f"linear_residual fc2 b{batch} {p}", batch < 64, _linear_residual_launch, u, w2, empty(c), x
    y = empty(8, 197, 1000)
    yield f"linear_residual C=1000 {p}", False, _linear_residual_launch, eight, empty(1000, c), empty(1000), y
    yield f"linear_residual K=1000 {p}", False, _linear_residual_launch, y, empty(c, 1000), empty(c), eight
    yield (
        f"linear_residual pooled {p}",
        False,
        _linear_residual_launch,
        empty(8, 1, hidden),
        w2,
        empty(c),
        pooled[:, None],
    )
    for batch, g in ((1, one), (8, eight)):
        q = empty(batch, 197, hidden, dtype=torch.uint8)
        yield f"linear_gelu_backward b{batch} {p}", batch == 8, _linear_gelu_backward_launch, g, w2, q
    yield f"splitk_linear {p}", True, _splitk_linear_launch, empty(1, 197, hidden), w2, 4
    yield f"splitk_linear pooled {p}", False, _splitk_linear_launch, empty(1, 1, hidden), w2, 4

    rows, weights = empty(16 * 197, c), empty(16, 3 * c * branches, c)
    bias, scale = empty(16, 3 * c * branches), fp32(16 * 197)
    for block in (16, 64, 128):
        tiles = empty(3, rows.shape[0] // block + 16, dtype=torch.int32)
        yield f"grouped_linear {block} {p}", block == 64, _grouped_kernels.launch, rows, weights, bias, tiles
        if block > 16:
            uneven, apart = empty(rows.shape[0], 1000), empty(16, 3 * c * branches, 1000)
            yield f"grouped_linear K=1000 {block} {p}", False, _grouped_kernels.launch, uneven, apart, bias, tiles
    tiles = empty(3, rows.shape[0] // 64 + 16, dtype=torch.int32)
    g = empty(16 * 197, 3 * c * branches)
    yield f"grouped_linear scaled {p}", False, _grouped_kernels.launch, rows, weights, bias, tiles, scale
    yield f"grouped_linear gx {p}", False, _grouped_kernels.launch, g, weights.transpose(1, 2), None, tiles
    yield f"grouped_linear_backward {p}", True, _grouped_kernels.backward_launch, g, rows, tiles, 16
    yield f"grouped_linear_backward K=1000 {p}", False, _grouped_kernels.backward_launch, g, uneven, tiles, 16, scale
    yield f"grouped_linear_backward scaled {p}", False, _grouped_kernels.backward_launch, g, rows, tiles, 16, scale


def attentions(heads: int) -> Iterator[tuple[Any, ...]]:
    """Yield attention at 224 px (all keys at once), at 384 px, of a pooled token, of segments, folded, wide heads."""
    launch, width = _attention_kernel.launch, 3 * 64 * heads
    h = f"{heads}h"
    x, bias, scale = empty(8, 197, width), empty(width), fp32(8, 197)
    packed, offsets, row_scale = empty(2048, width), empty(9, dtype=torch.int32), fp32(2048)
    yield f"packed_attention 197 {h}", True, launch, x, heads
    yield f"packed_attention 577 {h}", True, launch, empty(8, 577, width), heads
    yield f"packed_attention 50 {h}", False, launch, empty(8, 50, width), heads
    yield f"packed_attention pooled {h}", False, launch, x, heads, None, 1
    yield f"packed_attention folded {h}", False, launch, x, heads, None, None, 1.0, scale, bias
    yield f"packed_attention segments {h}", False, launch, packed, heads, offsets, None, 1.0, None, None, 577
    yield (
        f"packed_attention segments folded {h}", True,
        launch, packed, heads, offsets, None, 1.0, row_scale, bias, 577,
    )  # fmt: skip
    for d, count in ((20, heads), (72, 3), (80, heads), (128, heads)):  # 20 and rows of 9 · 72 are not aligned
        yield f"packed_attention D={d} {h}", False, launch, empty(8, 197, 3 * d * count), count
    for n in (50, 197, 257, 288):
        x, scale = empty(8, n, width), fp32(8, n)
        yield f"short_attention {n} {h}", n == 197, short_attention, x, heads
        yield f"short_attention folded {n} {h}", n == 197, short_attention, x, heads, None, 1.0, scale, bias
    yield f"short_attention pooled {h}", False, short_attention, x, heads, 1, 1.0, scale, bias
    for n, d in ((224, 64), (240, 64), (208, 48), (256, 32)):
        x = empty(8, n, 3 * d * heads)
        yield f"short_attention {n} D={d} {h}", False, short_attention, x, heads
        yield (
            f"short_attention folded {n} D={d} {h}", False,
            short_attention, x, heads, None, 1.0, fp32(8, n), empty(3 * d * heads),
        )  # fmt: skip


def short_attention(
    qkv: Tensor,
    heads: int,
    queries: int | None = None,
    scale: float = 1.0,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Launch what `packed_attention` does where "short" is chosen."""
    if _short_attention.fits(qkv, heads, scale, row_scale is not None):
        _short_attention.short_attention(qkv, heads, queries, scale, row_scale, bias)
    else:
        _attention_kernel.launch(qkv, heads, None, queries, scale, row_scale, bias)
