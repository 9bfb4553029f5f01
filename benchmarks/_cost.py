"""Cost model of a forward pass: its kernels from the model's sizes, the time of each from a few constants.

    pass      7 launches of the host + Σ over kernels of (gap + time)
    product   prologue + max(bytes / copy, min over tiles of waves · K / 64 · max(step, FLOPs of a tile / gemm))
    others    ramp + bytes / copy, and for attention ramp + key blocks · step + padded FLOPs / rate

Waves are tiles over the card's multiprocessors, rounded up; a product's tile is the one that is quickest, as a library
would choose. Documents and tests use this without torch.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

MULTIPROCESSORS = 132
TILES = ((64, 32), (64, 64), (128, 64), (128, 128), (192, 192), (128, 256))
"""Rows and columns of the tiles that cuBLAS and Triton were seen to use on Hopper."""

K_STEP = 64
HOST_LAUNCHES = 7
"""Of a graphed call: the copy in, the replay, the copy out, and what waits for them."""

Kind = Literal["product", "pass", "attention", "convolution"]
Form = Literal["fd6ca4a", "before", "after", "before, folded", "after, folded"]
FORMS: tuple[Form, ...] = ("fd6ca4a", "before", "after", "before, folded", "after, folded")
"""The commit that was measured; later code with norms of its own or folded, before and after these changes: shorter
attention to few keys, GELU in the library's epilogue at large batches, and one chain of dependent launches at small
ones, whose weights arrive while the kernel before runs."""


@dataclass(frozen=True)
class Sizes:
    """A ViT of equal blocks with patches of 16 pixels and MLPs of ratio 4.

    Attributes:
        depth: blocks.
        branches: parallel attentions, and FFNs, of a block.
        channels: of a token.
    """

    depth: int
    branches: int
    channels: int

    @property
    def heads(self) -> int:
        """Heads of a branch, of 64 channels."""
        return self.channels // 64


SIZES = {
    "S18x2": Sizes(18, 2, 384), "S36x1": Sizes(36, 1, 384), "B/16": Sizes(12, 1, 768), "B18x2": Sizes(18, 2, 768),
    "S/16": Sizes(12, 1, 384), "B36x1": Sizes(36, 1, 768),
}  # fmt: skip


@dataclass(frozen=True)
class Constants:
    """What the model knows of a card.

    Attributes:
        launch: µs of the host for one launch.
        gap: µs from an empty kernel's start to the next one's inside a graph; what a kernel does comes on top.
        copy, gelu: GB/s of passes over tensors, and of GELU's, which computes more.
        gemm: TFLOP/s of products that fill the card.
        ramp, prologue: µs that a pass, and a product, needs before and after its work.
        step: µs of 64 of a product's K at the least: loads in flight, not arithmetic.
        key_block, attention: µs of 64 keys at the least; TFLOP/s on tiles of 64 queries and keys.
        conv_s, conv_b: µs that cuDNN's convolutions to 384 and to 768 channels take at the least.
        conv_s_rate, conv_b_rate: TFLOP/s of these.
    """

    launch: float
    gap: float
    copy: float
    gelu: float
    gemm: float
    ramp: float
    prologue: float
    step: float
    key_block: float
    attention: float
    conv_s: float
    conv_b: float
    conv_s_rate: float
    conv_b_rate: float


NAMES = tuple(field.name for field in fields(Constants))
CEILING = {"launch": "launch", "gap": "graph_gap", "copy": "copy", "gelu": "copy", "gemm": "gemm"}
"""Constants that were measured by themselves, and the row of gpu_ceilings.csv that says so."""

SLACK = 1.5
"""How far a constant may be from its ceiling, either way."""

PLAUSIBLE = {
    "ramp": (0.5, 3.0), "prologue": (0.5, 4.0), "step": (0.05, 0.2), "key_block": (0.3, 3.0), "attention": (100, 500),
    "conv_s": (30, 120), "conv_b": (30, 120), "conv_s_rate": (8, 80), "conv_b_rate": (8, 80),
}  # fmt: skip
"""Bounds of the constants that no ceiling stands for: a kernel starts and ends in a few µs, a step is 90 to 350 cycles,
attention stays below two thirds of the products' rate, and both convolutions were far from theirs."""


@dataclass(frozen=True)
class Kernel:
    """Equal kernels of a pass.

    Attributes:
        group: as in `_groups.COLUMNS`.
        kind: which formula holds.
        count: how many.
        sizes: rows, columns and K of a product or a convolution; heads of all images, queries and keys; bytes.
        chained: it is set up while the one before runs: no gap.
        hidden: share of its prologue that the kernel before hides.
        factor: of its time without ramp and prologue.
        tail: bytes that are written after the arithmetic, not beside it.
    """

    group: str
    kind: Kind
    count: int
    sizes: tuple[float, ...]
    chained: bool = False
    hidden: float = 0.0
    factor: float = 1.0
    tail: float = 0.0

    def us(self, c: Constants) -> float:
        """Return the µs of one of them, without the gap."""
        if self.kind == "product":
            return (1 - self.hidden) * c.prologue + self.factor * product_us(*self.sizes, c) + 1e-3 * self.tail / c.copy
        if self.kind == "pass":
            return c.ramp + 1e-3 * self.sizes[0] / (c.gelu if self.group == "GELU" else c.copy)
        a, b, d = self.sizes
        if self.kind == "attention":
            queries, keys = 64 * math.ceil(b / 64), 64 * math.ceil(d / 64)
            work = keys / 64 * c.key_block + 1e-6 * 4 * 64 * a * queries * keys / c.attention
            return (1 - self.hidden) * c.ramp + self.factor * work
        least, rate = (c.conv_s, c.conv_s_rate) if b == 384 else (c.conv_b, c.conv_b_rate)
        return max(least, 1e-6 * 2 * a * b * d / rate)


def product_us(rows: float, columns: float, k: float, c: Constants) -> float:
    """Return the µs of a product after its prologue."""
    moved = 2 * (rows * k + k * columns + rows * columns)
    steps = math.ceil(k / K_STEP)
    rate = 1e6 * c.gemm / MULTIPROCESSORS  # FLOP per µs of one multiprocessor
    best = min([waves * max(c.step, work / rate) for waves, work in _waves(rows, columns)])
    return max(steps * best, 1e-3 * moved / c.copy)


@functools.cache
def _waves(rows: float, columns: float) -> list[tuple[int, int]]:
    """Return for each of `TILES` how many waves there are, and the FLOPs of a step of one tile."""
    counts = [(math.ceil(rows / m) * math.ceil(columns / n), 2 * m * n * K_STEP) for m, n in TILES]
    return [(math.ceil(count / MULTIPROCESSORS), work) for count, work in counts]


def pass_us(kernels: list[Kernel], c: Constants) -> float:
    """Return the µs of a call."""
    return HOST_LAUNCHES * c.launch + sum(k.count * (k.us(c) + (0.0 if k.chained else c.gap)) for k in kernels)


def kernels_of(model: str, px: int, batch: int, form: Form) -> list[Kernel]:
    """Return the kernels of a forward pass: patches, blocks, the last block for the class token alone, the head."""
    sizes, patches = SIZES[model], (px // 16) ** 2
    tokens = batch * (patches + 1)
    found = list(_patches(sizes, px, batch, form))
    for count, rows, queries in ((sizes.depth - 1, tokens, patches + 1), (1, batch, 1)):
        found += _Block(sizes, batch, patches + 1, rows, queries, count, form).kernels()
    return [*found, Kernel("matrix products", "product", 1, (batch, 1000, sizes.channels))]


def _patches(sizes: Sizes, px: int, batch: int, form: Form) -> Iterator[Kernel]:
    c, patches = sizes.channels, (px // 16) ** 2
    tokens, images = batch * (patches + 1), 6 * batch * px * px
    yield Kernel("other", "pass", 2, ((images + 2000 * batch),))  # images in, logits out
    if form == "fd6ca4a":
        yield Kernel("patch embedding", "convolution", 1, (batch * patches, c, 768))
        if c == 768:  # to the layout that this convolution wants, and back
            yield Kernel("patch embedding", "pass", 2, (2 * images,))
            yield Kernel("patch embedding", "pass", 1, (4 * tokens * c,))
        # positions and class token: broadcast and strided passes, at half a copy's rate
        yield Kernel("other", "pass", 3, (2 * 4 * tokens * c,))
        yield Kernel("norms", "pass", 1, (4 * tokens * c,))
        return
    yield Kernel("patch embedding", "pass", 1, (images + 2 * tokens * 768,), chained=True)
    yield Kernel("matrix products", "product", 1, (tokens, c, 768))
    yield Kernel("norms", "pass", 1, (6 * tokens * c,), chained=True)


@dataclass(frozen=True)
class _Block:
    """``count`` equal blocks: ``rows`` of ``batch`` · ``tokens`` go on behind the attention."""

    sizes: Sizes
    batch: int
    tokens: int
    rows: int
    queries: int
    count: int
    form: Form

    def kernels(self) -> list[Kernel]:
        c, wide = self.sizes.channels, self.sizes.branches * self.sizes.channels
        heads = self.batch * self.sizes.branches * self.sizes.heads
        all_rows, new = self.batch * self.tokens, self.form.startswith("after")
        short = 0.75 if new and self.tokens <= 288 else 1.0  # one softmax, no rescaling
        folded = self.form.endswith("folded")
        return [
            self._product(3 * wide, c, all_rows, ours=folded),
            self._kernel("attention", "attention", (heads, self.queries, self.tokens), factor=short),
            *self._closed(wide, folded),
            *self._activated(4 * wide, c, folded),
            *self._closed(4 * wide, folded),
        ]

    @property
    def _few(self) -> bool:
        return self.form != "fd6ca4a" and self.batch <= 8

    def _kernel(self, group: str, kind: Kind, sizes: tuple[float, ...], **options: float) -> Kernel:
        """Our own kernels are chained where there are few programs."""
        return Kernel(group, kind, self.count, sizes, chained=self._few, **options)  # type: ignore[arg-type]

    def _product(self, n: int, k: int, rows: int, *, ours: bool, tail: float = 0.0) -> Kernel:
        """Ours reach nine tenths of cuBLAS's rate. In a chain all are set up early, their weights fetched."""
        chain = self.form.startswith("after") and self._few
        return Kernel(
            "matrix products", "product", self.count, (rows, n, k), chained=(ours and self._few) or chain,
            hidden=0.4 if chain else 0.0, factor=1 / 0.9 if ours and not self._few else 1.0, tail=tail,
        )  # fmt: skip

    def _activated(self, n: int, k: int, folded: bool) -> Iterator[Kernel]:
        """fc1 and GELU: two kernels, or one that writes what it activated, or the library's from 64 images on."""
        if self.form == "fd6ca4a":
            yield self._product(n, k, self.rows, ours=False)
            yield self._kernel("GELU", "pass", (4 * self.rows * n,))
            return
        library = self.form == "after" and self.batch >= 64 and not folded
        yield self._product(n, k, self.rows, ours=not library, tail=0.0 if library else 2 * self.rows * n)

    def _closed(self, k: int, folded: bool) -> Iterator[Kernel]:
        """The product that adds to the residual stream and, unless it is folded, the norm behind it."""
        c = self.sizes.channels
        yield self._product(c, k, self.rows, ours=folded or self._few, tail=4 * self.rows * c if folded else 0.0)
        if not folded:
            yield self._kernel("norms", "pass", (8 * self.rows * c,))
