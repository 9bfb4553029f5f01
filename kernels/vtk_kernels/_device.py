"""What launchers ask of the device they launch on, and how a kernel overlaps with the one before it."""

import functools
from typing import Any, no_type_check

import torch
from torch import Tensor

from vtk_kernels._triton import gdc_launch_dependents, gdc_wait, tl, triton

_HOPPER = 9
"""Compute capability with tensor maps (TMA) and programmatic dependent launch."""

_USUAL = 132
"""Multiprocessors assumed where there is no device to ask: the interpreter, and compilation without a GPU."""


def is_hopper(x: Tensor) -> bool:
    """Return whether ``x`` is on a card of compute capability 9.0 or later."""
    return capability(x) >= _HOPPER


def capability(x: Tensor) -> int:
    """Return the major compute capability of the card that holds ``x``: 8, 9, 10 …; 0 on the CPU."""
    return _capability(x.device.index) if x.is_cuda else 0


def multiprocessors(x: Tensor) -> int:
    """Return the number of multiprocessors of the card that holds ``x``."""
    return _multiprocessors(x.device.index) if x.is_cuda else _USUAL


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

    Every kernel that is launched with ``launch_pdl`` calls this before it reads or writes memory.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def _capability(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0]


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
