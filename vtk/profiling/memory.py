"""Peak memory of a measurement, free memory, and out-of-memory errors."""

import contextlib
import ctypes
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from vtk.profiling.memory_count import NOTE

_PROC = Path("/proc/self")
_CGROUP = Path("/sys/fs/cgroup")
_SIGNS = (
    "can't allocate memory",  # torch, CPU
    "out of memory",  # CUDA driver
    "cublas_status_alloc_failed",
    "failed to allocate memory",  # onnxruntime
    "bad_alloc",
    "bad allocation",
)


class PeakMemory:
    """Bytes at most between `start` and `stop`: of torch's CUDA allocator, or of this whole process on a Linux CPU."""

    def __init__(self, device: torch.device, *, torch_allocator: bool) -> None:
        self.device, self.torch_allocator = device, torch_allocator

    def start(self) -> None:
        """Forget earlier peaks."""
        self._known = False
        if self.device.type == "cuda":
            self._known = self.torch_allocator
            if self._known:
                torch.cuda.reset_peak_memory_stats(self.device)
        elif sys.platform.startswith("linux"):
            try:
                (_PROC / "clear_refs").write_text("5")
            except OSError:  # some containers mount it read-only: then the peak is not ours to know
                return
            self._known = True

    def stop(self) -> int | None:
        """Return the peak since `start`, None where it cannot be known."""
        if not self._known:
            return None
        return int(torch.cuda.max_memory_allocated(self.device)) if self.device.type == "cuda" else _high_water()


class Holdings:
    """What each of several loaded back-ends holds of torch's CUDA allocator, so that one's peak leaves out the others'.

    The allocator keeps an exact account. A CPU has none, and differences of a process's memory are none: there nothing
    is charged.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._bytes: Counter[str] = Counter()

    @contextlib.contextmanager
    def charge(self, name: str) -> Iterator[None]:
        """Put what memory grows (or shrinks) by in this block to the account of ``name``."""
        before = self._in_use()
        try:
            yield
        finally:
            self._bytes[name] += self._in_use() - before

    def of_others(self, name: str) -> int:
        """Return what all back-ends but ``name`` hold."""
        return max(0, sum(self._bytes.values()) - self._bytes[name])

    def _in_use(self) -> int:
        return int(torch.cuda.memory_allocated(self.device)) if self.device.type == "cuda" else 0


def describe(device: torch.device, *, together: bool = False) -> str:
    """Say in one line what the memory columns mean on ``device``; ``together``: with several back-ends loaded."""
    if device.type == "cuda":
        less = ", less what the other loaded back-ends hold" if together else ""
        return f"peak of torch's CUDA allocator{less} (– for back-ends that do not use it)"
    others = ", the other loaded back-ends too" if together else ""
    whole = f"; process: peak resident memory of all of it{others}" if sys.platform.startswith("linux") else ""
    return f"{NOTE}{whole}"


def release(device: torch.device, *, collect: bool = False) -> None:
    """Give unused memory back, so that one cell does not count against the next.

    ``collect`` first looks for unreachable cycles, which takes a quarter of a second once torch is loaded: worth it
    after a model was dropped or memory ran out, not between cells.
    """
    if collect:
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if trim is not None:
            trim(0)


def available_bytes(device: torch.device) -> int:
    """Return how much more memory could be had: of the device, or of this machine and its container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):  # no cgroup v2 here
        return free
    return free


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that memory ran out, whichever library raised it."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return any(sign in text for sign in _SIGNS)


def _high_water() -> int | None:
    for line in (_PROC / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024  # the kernel writes kB and means KiB
    return None
