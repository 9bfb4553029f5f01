"""Facts of the device for launchers, and the overlap of a kernel with the one before it.

At few rows a kernel of a ViT takes 2 to 8 µs whatever it computes, and the weights of a deep model do not stay in the
L2 cache from one pass to the next. So the kernels of a pass are a chain: each is set up while the one before it runs,
and fetches what no kernel writes, weights and biases, into the L2 cache before it waits for that one's results.
"""

import functools
from typing import Any, no_type_check

import torch
from torch import Tensor

from vtk_kernels._triton import gdc_launch_dependents, gdc_wait, tl, triton

_HOPPER = 9
"""Compute capability with tensor maps (TMA) and programmatic dependent launch."""

_USUAL = 132
"""Multiprocessors assumed where there is no device to ask: the interpreter, and compilation without a GPU."""


_CONSUMER = 12
"""Compute capability of later cards whose programs have 99 KiB of shared memory, as those of 8.6 and 8.9 do."""


def is_hopper(x: Tensor) -> bool:
    """Return whether ``x`` is on a card of compute capability 9.0 or later that has the shared memory of a Hopper."""
    return _HOPPER <= capability(x) < _CONSUMER


def capability(x: Tensor) -> int:
    """Return the major compute capability of the card that holds ``x``: 8, 9, 10 …; 0 on the CPU."""
    return _capability(x.device.index) if x.is_cuda else 0


def multiprocessors(x: Tensor) -> int:
    """Return the number of multiprocessors of the card that holds ``x``."""
    return _multiprocessors(x.device.index) if x.is_cuda else _USUAL


FEW_ROWS = 8 * 261
"""Rows up to which a product belongs to a chain: eight images of 224 pixels in the longest of the usual models, with
patches of 14 pixels and four registers. With more, arithmetic hides what a chain saves, and weights are few bytes."""

_LINE = tl.constexpr(128)
"""Bytes of a line of the L2 cache."""

_FEW = 1536
"""Programs up to which a launch is `chained`: with 12,608 of them waiting cost more than it hid, 52 µs became 58."""


def chained(x: Tensor, programs: int) -> dict[str, Any]:
    """Return the launch options of a kernel that begins with `follow`: it may be set up while the one before it runs.

    Inside a CUDA graph the time from one kernel to the next was 1 µs on an H200, and a kernel of a ViT-S takes 2 to 8
    µs at batch 1: overlapping the two was worth 0.5 to 1 µs a kernel. Older cards launch as ever.

    Args:
        x: a tensor on the card.
        programs: of the launch.
    """
    return {"PDL": True, "launch_pdl": True} if programs <= _FEW and is_hopper(x) else {"PDL": False}


@triton.jit
@no_type_check
def follow(PDL: tl.constexpr):
    """Wait until the kernel before has written its results, then let the next one be set up.

    Every kernel launched with ``launch_pdl`` calls this before it reads or writes memory; `fetch` alone is earlier.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def ahead(options: dict[str, Any], rows: int, w: Tensor) -> Tensor | None:
    """Return the weight that a product's programs `fetch` before they `follow`, None if they should not.

    Nothing a kernel writes may be read before it is waited for. A fetch into the L2 cache reads nothing: there all
    multiprocessors and the copy engine find what was written last, so that even new weights are never seen old.

    Args:
        options: of the launch, from `chained`.
        rows: T of the product.
        w: (F, K).
    """
    return w if options["PDL"] and rows <= FEW_ROWS and w.is_contiguous() else None


@triton.jit
@no_type_check
def share(size, pid, programs):
    """Return (first byte, bytes) of a program's part of so many bytes: whole lines, together all of them, each once."""
    part = tl.cdiv(tl.cdiv(size, programs), _LINE) * _LINE
    return pid * part, tl.maximum(tl.minimum(part, size - pid * part), 0)


@triton.jit
@no_type_check
def fetch(ptr, count, pid, programs):
    """Begin to copy a program's share of a contiguous tensor of so many elements into the L2 cache.

    One thread asks for all of it. Begins at a multiple of 16 bytes, at most 15 before the tensor, and takes whole 16s.
    """
    first, size = share(count * (ptr.dtype.element_ty.primitive_bitwidth // 8), pid, programs)
    tl.inline_asm_elementwise(
        """{
        .reg .pred one;
        .reg .b32 thread;
        .reg .b64 start;
        mov.u32 thread, %tid.x;
        setp.eq.u32 one, thread, 0;
        setp.gt.and.s32 one, $2, 15, one;
        and.b64 start, $1, -16;
        @one cp.async.bulk.prefetch.L2.global [start], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [ptr.to(tl.int64, bitcast=True) + first, size // 16 * 16],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@functools.cache
def _capability(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0]


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
