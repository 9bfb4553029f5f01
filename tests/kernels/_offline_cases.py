"""Launches that `_offline` compiles: of ViT-S, B and L with one and two branches in bf16, and of measured shapes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vtk_kernels import (
    _attention_kernel,
    _broadcast_kernels,
    _grouped_kernels,
    _low_rank_kernels,
    _low_rank_linear_kernel,
    _short_attention,
    _swiglu_backward_kernel,
    _swiglu_kernel,
    choices,
)
from vtk_kernels import _rotary_attention as _rotary
from vtk_kernels._heads import HeadNorms, Heads
from vtk_kernels._heads_kernel import prepared
from vtk_kernels._residual_kernel import counters_needed
from vtk_kernels.add_norm import _add_norm_launch
from vtk_kernels.add_norm_e4m3 import _add_norm_e4m3_launch
from vtk_kernels.linear import _linear_launch
from vtk_kernels.linear_gelu import _linear_gelu_launch
from vtk_kernels.linear_gelu_backward import _linear_gelu_backward_launch
from vtk_kernels.linear_residual import _linear_residual_launch
from vtk_kernels.norm import _norm_launch, norm_backward_launch
from vtk_kernels.patchify import launch as _patchify_launch
from vtk_kernels.patchify_counters import _patchify_counters_launch
from vtk_kernels.quantize_rows import _quantize_rows_launch
from vtk_kernels.row_stats import pieces_of
from vtk_kernels.splitk_linear import _splitk_linear_launch, default_splits

SIZES = {"S": (384, 6), "B": (768, 12), "L": (1024, 16)}
"""Channels and heads."""

GATED = {"EVA-02 B/14": (257, 768, 2048), "EVA-02 L/14": (257, 1024, 2730), "DINOv3 H/16+": (261, 1280, 5120)}
"""Tokens at 224 and 256 px, channels and hidden features of models with SwiGLU."""

TORCHS = ("kept_attention",)
"""Operations with a choice between kernels that are all torch's own."""

EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """A call of a launcher; default tests compile the essential ones, `make test-peers` also the measured, slow all."""

    label: str
    launcher: Callable[..., object]
    arguments: tuple[Any, ...]
    essential: bool
    measured: bool = False


def cases() -> Iterator[Case]:
    """Yield the table."""
    for label, essential, launcher, *arguments in stems():
        yield Case(label, launcher, tuple(arguments), essential)
    for size, (channels, heads) in SIZES.items():
        for made, essential in (
            *((row, size == "S") for row in row_wise(channels)),
            *((row, size == "S" and branches == 2) for branches in (1, 2) for row in products(channels, branches)),
            *((row, size == "S") for row in low_ranks(channels)),
            *((row, size == "S" and branches == 2) for branches in (1, 2) for row in attentions(heads * branches)),
            *((row, size == "S") for row in rotary_attentions(heads)),
        ):
            label, first, launcher, *arguments = made
            yield Case(f"{label} {size}", launcher, tuple(arguments), first and essential)
    for size, channels in (("T", 192), *((size, channels) for size, (channels, _) in SIZES.items())):
        for branches in (1, 2):
            for label, first, launcher, *arguments in slices(channels, branches):
                yield Case(f"{label} {size}", launcher, tuple(arguments), first and size == "S" and branches == 2)
    for size, shape in GATED.items():
        for label, first, launcher, *arguments in gated(*shape, size.startswith("EVA")):
            yield Case(f"{label} {size}", launcher, tuple(arguments), first and size == "EVA-02 B/14")
    for dtype in (torch.bfloat16, torch.float16):
        for label, launcher, *arguments in measured(dtype):
            yield Case(f"{label} {str(dtype).removeprefix('torch.')}", launcher, tuple(arguments), False, True)


def measured(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield (label, launcher, arguments…) of every shape in choices.json, whatever was chosen, and of its relatives.

    The relatives are launched at the same shapes: the other forms of fc1, fc1's gradient, fc2 with the residual.
    """
    entries = choices.read(Path(choices.__file__).with_name("choices.json"))
    for op, rows, n, k in sorted({(e["op"], e["rows"], e["n"], e["k"]) for e in entries}):
        at = f"{rows}×{n}×{k}"
        x, w, b = (empty(*shape, dtype=dtype) for shape in ((rows, k), (n, k), (n,)))
        if op == "packed_attention":
            qkv = empty(rows, n, 3 * 64 * k, dtype=dtype)
            yield f"{op} {at}", _attention_kernel.launch, qkv, k
            yield f"{op} short {at}", short_attention, qkv, k  # with steps where there are too many keys
        elif op == "rotary_attention":
            qkv = empty(rows, n, 3 * 64 * k, dtype=dtype)
            for half in (True, False):
                turned = Heads(k, k, fp32(n, 64), half)
                yield f"{op} {at}" if half else f"{op} pairs {at}", _rotary.launch, qkv, turned
                yield f"{op} prepared {'half' if half else 'pairs'} {at}", prepared, qkv, turned
        elif op == "linear_gelu":
            q = empty(rows, n, dtype=torch.uint8)
            yield f"{op} {at}", _linear_gelu_launch, x, w, b
            yield f"{op} stats {at}", _linear_gelu_launch, x, w, b, False, row_stats(rows, k), EPS
            yield f"{op} q {at}", _linear_gelu_launch, x, w, b, True
            yield f"{op} backward {at}", _linear_gelu_backward_launch, x, empty(k, n, dtype=dtype), q
        elif op == "linear_swiglu":
            q, scales = empty(rows, n, dtype=torch.uint8), row_stats(rows, n // 2)
            yield f"{op} {at}", _swiglu_kernel.launch, x, w, b
            yield f"{op} stats {at}", _swiglu_kernel.launch, x, w, b, row_stats(rows, k), EPS, False, True
            yield f"{op} q {at}", _swiglu_kernel.launch, x, w, b, None, None, False, False, True
            yield f"{op} backward {at}", _swiglu_backward_kernel.launch, x, empty(k, n // 2, dtype=dtype), q, scales
        elif op in ("splitk_linear", "linear_residual"):
            splits, whole = default_splits(rows, n, k), (x, w, b, empty(rows, n, dtype=dtype))
            if op == "splitk_linear":
                yield f"{op} {at}", _splitk_linear_launch, x, w, splits
            yield f"{op} whole {at}" if op == "splitk_linear" else f"{op} {at}", _linear_residual_launch, *whole
            if splits > 1:
                counters = empty(counters_needed(rows, n), dtype=torch.int32)
                yield f"{op} slices {at}", _linear_residual_launch, *whole, splits, counters
        elif op == "ln_folded":
            h, b1, w1 = (empty(*shape, dtype=dtype) for shape in ((rows, n), (k,), (k, n)))
            yield f"{op} {at}", _linear_residual_launch, x, w, b, h
            yield f"{op} fc1 {at}", _linear_gelu_launch, h, w1, b1, False, row_stats(rows, n), EPS
        elif op == "grouped_linear":
            tiles = empty(3, rows // 64 + 16, dtype=torch.int32)
            yield f"{op} {at}", _grouped_kernels.launch, x, empty(16, n, k, dtype=dtype), None, tiles
        elif op == "grouped_low_rank":
            tiles, bias = empty(3, rows // 64 + 16, dtype=torch.int32), empty(16, n, dtype=dtype)
            factors = *(empty(256, size, dtype=dtype) for size in (k, n)), empty(16, 2, dtype=torch.int32), tiles, 16
            yield f"{op} {at}", _low_rank_kernels.launch, empty(rows, n, dtype=dtype), x, *factors, bias
            yield f"{op} epilogue {at}", _low_rank_linear_kernel.launch, x, w, *factors, bias
        elif op == "residual":
            yield f"{op} {at}", _norm_launch, empty(rows, n, dtype=dtype), EPS, b
            yield f"{op} separate {at}", _add_norm_launch, *(empty(rows, n, dtype=dtype) for _ in range(2)), EPS
        elif op not in TORCHS:
            raise NotImplementedError(f"choices.json has {op}: say how it is launched")


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
    yield "add_norm partials", True, _add_norm_launch, one, None, EPS, partials, vector
    yield "add_norm table", False, _add_norm_launch, one, x, EPS
    yield "add_norm table partials", False, _add_norm_launch, one, None, EPS, fp32(4, 8, 197, c), vector
    yield "add_norm_e4m3", True, _add_norm_e4m3_launch, x, x, EPS
    yield "quantize_rows", False, _quantize_rows_launch, x
    yield "quantize_rows GELU", True, _quantize_rows_launch, empty(8, 197, 4 * c), True
    yield "quantize_rows GELU ×2", False, _quantize_rows_launch, empty(8, 197, 8 * c), True
    yield "norm RMS", True, _norm_launch, x, EPS, None, True
    yield "norm_backward RMS", False, norm_backward_launch, x, x, rstd, None, True
    yield "add_norm RMS", False, _add_norm_launch, x, x, EPS, None, None, True
    yield "add_norm RMS partials", True, _add_norm_launch, one, None, EPS, partials, vector, True
    yield "context_broadcast", False, _broadcast_kernels.launch, x, x, None, None
    yield "context_broadcast stats", True, _broadcast_kernels.launch, x, x, vector, None, True
    yield "context_broadcast backward", False, _broadcast_kernels.launch, None, x, None, None
    yield "context_broadcast segments", False, _broadcast_kernels.launch, packed, packed, None, offsets


def stems() -> Iterator[tuple[Any, ...]]:
    """Yield images cut into patches, which no width of a model changes: of one grid, padded, in another order."""
    images = empty(8, 3, 224, 224)
    yield "patchify 16", True, _patchify_launch, images, (16, 16), 1, 768
    yield "patchify counters", True, _patchify_counters_launch, images, (16, 16), 1, 768, 600
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


def gated(n: int, c: int, f: int, sub_norm: bool) -> Iterator[tuple[Any, ...]]:
    """Yield both products of a SwiGLU MLP: behind a norm, before a sub-norm, in training; fc2 behind the sub-norm."""
    w, b, w2, vector = empty(2 * f, c), empty(2 * f), empty(c, f), empty(c)
    counters = empty(counters_needed(8 * n, c), dtype=torch.int32)
    for batch in (1, 8, 64):
        x, h, known, of_h = empty(batch, n, c), empty(batch, n, f), row_stats(batch, n, c), row_stats(batch, n, f)
        eight, few = batch == 8, batch == 1
        yield f"linear_swiglu b{batch}", False, _swiglu_kernel.launch, x, w, b
        yield f"linear_swiglu stats b{batch}", eight, _swiglu_kernel.launch, x, w, b, None, None, False, True
        yield f"linear_swiglu folded b{batch}", few, _swiglu_kernel.launch, x, w, b, known, EPS, False, sub_norm
        yield f"linear_swiglu RMS b{batch}", eight, _swiglu_kernel.launch, x, w, None, known, EPS, True
        yield f"linear RMS b{batch}", False, _linear_launch, x, empty(3 * c, c), empty(3 * c), known, EPS, True
        fc2 = h, w2, vector, x
        yield f"linear_residual sub-norm b{batch}", eight, _linear_residual_launch, *fc2, 1, None, of_h, EPS
        splits = default_splits(batch * n, c, f)
        if splits > 1:
            sliced = *fc2, splits, counters, of_h, EPS
            yield f"slices sub-norm b{batch}", few, _linear_residual_launch, *sliced
    yield "linear_swiglu pooled", False, _swiglu_kernel.launch, empty(8, n, c)[:, 0], w, b
    x, g = empty(8, n, c), empty(8, n, c)
    q, scales = empty(8, n, 2 * f, dtype=torch.uint8), row_stats(8, n, f)
    yield (
        "linear_gelu RMS",
        False,
        _linear_gelu_launch,
        x,
        empty(4 * c, c),
        empty(4 * c),
        False,
        row_stats(8, n, c),
        EPS,
        True,
    )
    yield "linear_swiglu q", True, _swiglu_kernel.launch, x, w, b, None, None, False, False, True
    yield "linear_swiglu_backward", True, _swiglu_backward_kernel.launch, g, w2, q, scales
    yield "linear_swiglu_backward no w2", False, _swiglu_backward_kernel.launch, empty(8, n, f), None, q, scales


def low_ranks(c: int) -> Iterator[tuple[Any, ...]]:
    """Yield the factors of qkv and proj of 16 tasks: one rank, mixed ones, int8, a few pooled rows, odd sizes."""
    launch, rows, arena, spans = _low_rank_kernels.launch, 16 * 197, 16 * 40, empty(16, 2, dtype=torch.int32)
    rows_of_x, linear = empty(rows, c), _low_rank_linear_kernel.launch
    tiles = empty(3, rows // 128 + 16, dtype=torch.int32)
    for rank in (16, 64):
        for name, f in (("qkv", 3 * c), ("proj", c)):
            factors = empty(rows, f), empty(rows, c), empty(arena, c), empty(arena, f), spans, tiles, rank
            yield f"grouped_low_rank {name} r{rank}", (name, rank) == ("qkv", 16), launch, *factors, empty(16, f)
            codes = *factors[:2], *(empty(arena, n, dtype=torch.int8) for n in (c, f)), *factors[4:], empty(16, f)
            scales = fp32(arena), fp32(c) if name == "qkv" else None, fp32(f)
            w = empty(f, c)
            first = (name, rank) == ("qkv", 16)
            yield f"low_rank_linear {name} r{rank}", first, linear, rows_of_x, w, *factors[2:], empty(16, f)
            yield f"low_rank_linear int8 {name} r{rank}", False, linear, rows_of_x, w, *codes[2:], *scales
            yield f"grouped_low_rank int8 {name} r{rank}", (name, rank) == ("qkv", 64), launch, *codes, *scales
    factors = empty(16, c), empty(16, c), empty(arena, c), empty(arena, c), spans, empty(3, 17, dtype=torch.int32), 16
    yield "grouped_low_rank pooled", False, launch, *factors, empty(16, c)
    yield "low_rank_linear pooled", False, linear, factors[1], empty(c, c), *factors[2:], empty(16, c)
    factors = empty(rows, 1000), empty(rows, 100), empty(arena, 100), empty(arena, 1000), spans, tiles, 300
    yield "grouped_low_rank K=100 r300", False, launch, *factors
    yield "low_rank_linear K=100 r300", False, linear, factors[1], empty(1000, 100), *factors[2:]
    yield "grouped_low_rank r0", False, launch, *factors[:6], 0, empty(16, 1000)


def slices(c: int, branches: int) -> Iterator[tuple[Any, ...]]:
    """Yield products of few rows in as many slices as a model takes; one where tiles fill the card is no slice."""
    counters, p = empty(counters_needed(8 * 197, c), dtype=torch.int32), f"×{branches}"
    for batch in (1, 2, 4, 8):
        for name, k in (("out", c * branches), ("fc2", 4 * c * branches)):
            splits = default_splits(197 * batch, c, k)
            operands = empty(batch, 197, k), empty(c, k), empty(c), empty(batch, 197, c), splits, counters
            if splits > 1:
                yield f"slices {name} b{batch} {p}", (name, batch) == ("fc2", 1), _linear_residual_launch, *operands
    for name, batch, rows, k in (("K=1000", 1, 197, 1000), ("pooled", 8, 1, 4 * c * branches)):
        operands = empty(batch, rows, k), empty(c, k), empty(c), empty(batch, rows, c), 4, counters
        yield f"slices {name} {p}", False, _linear_residual_launch, *operands


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


def rotary_attentions(heads: int) -> Iterator[tuple[Any, ...]]:
    """Yield DINOv3 at 256 px, EVA-02 at 224 px, folded forms, segments, norms, tables per head, biases, wide heads."""
    launch, d, h = _rotary.launch, 64, f"{heads}h"
    width = 3 * d * heads
    bias, packed, row_scale = empty(width), empty(2048, width), fp32(2048)
    offsets, rows = empty(9, dtype=torch.int32), empty(2048, dtype=torch.int32)
    in_segments, in_folded = (offsets, None, 1.0, None, None, 577), (offsets, None, 1.0, row_scale, bias, 577)
    for name, n, half in (("DINOv3", 261, True), ("EVA-02", 257, False)):
        label, x, turned = f"rotary_attention {name}", empty(8, n, width), Heads(heads, heads, fp32(n, d), half)
        folded, pointing = (1.0, fp32(8, n), bias), turned._replace(rope_row=rows)
        yield f"{label} {h}", True, launch, x, turned
        yield f"{label} prepared {h}", True, prepared, x, turned
        yield f"{label} prepared folded {h}", False, prepared, x, turned, *folded[1:]
        yield f"{label} folded {h}", True, launch, x, turned, None, None, *folded
        yield f"{label} pooled {h}", False, launch, x, turned, None, 1, *folded
        yield f"{label} segments {h}", half, launch, packed, pointing, *in_segments
        yield f"{label} segments folded {h}", False, launch, packed, pointing, *in_folded
    for kind in ("layer", "rms"):
        label, w = f"rotary_attention {kind}", [empty(heads, d) for _ in range(4)]
        norm = (
            HeadNorms(kind, EPS, w[0], w[1], w[2], w[3])
            if kind == "layer"
            else HeadNorms(kind, EPS, w[0], k_weight=w[2])
        )
        stacked = {name: empty(16, heads, d) for name in ("q_weight", "k_weight")}
        slots = norm._replace(slot=empty(8, dtype=torch.int32), q_bias=None, k_bias=None, **stacked)
        for half in (True, False):
            both = Heads(heads, heads, fp32(heads, 261, d), half, None, norm)
            yield f"{label} per head {'half' if half else 'pairs'} {h}", False, launch, empty(8, 261, width), both
        yield f"{label} prepared {h}", False, prepared, empty(8, 261, width), both, fp32(8, 261), bias
        yield f"{label} folded {h}", False, launch, empty(8, 261, width), both, None, None, 1.0, fp32(8, 261), bias
        alone = Heads(heads, heads, None, False, None, norm)
        yield f"{label} alone {h}", False, launch, empty(8, 197, width), alone, None, None, 1.0, None, bias
        own = Heads(heads, heads, fp32(577, d), True, rows, slots)
        yield f"{label} slots {h}", False, launch, packed, own, *in_segments
    biased, x = Heads(heads, heads, attn_bias=empty(heads, 197, 197)), empty(8, 197, width)
    yield f"rotary_attention biased {h}", False, launch, x, biased
    yield f"rotary_attention biased folded {h}", False, launch, x, biased, None, None, 1.0, fp32(8, 197), bias
    grouped = empty(2, 3077, 2 * heads * d)
    yield f"rotary_attention grouped {h}", False, launch, grouped, Heads(heads, heads // 2, fp32(3077, d), True)
    for d, count in ((20, heads), (88, 16), (72, heads), (80, heads), (96, heads), (128, heads)):  # 88: EVA's
        for half in (True, False):
            x, wide = empty(8, 257, 3 * d * count), Heads(count, count, fp32(257, d), half)
            yield f"rotary_attention prepared D={d} {'half' if half else 'pairs'} {h}", False, prepared, x, wide
            yield f"rotary_attention D={d} {'half' if half else 'pairs'} {h}", False, launch, x, wide


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
