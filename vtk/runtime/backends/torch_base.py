"""Base class of the back-ends that compute with torch in this process, under torch's global settings."""

import time
from collections.abc import Callable, Iterable
from typing import Self

import torch

from vtk.errors import UsageError
from vtk.models.fp32 import FullPrecision


class TorchBackend:
    """Holds torch's number of threads and full fp32 products from loading to `close`, which puts back what was set."""

    name: str
    batch: int | None = None
    options: tuple[str, ...] = ()

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.load_s = 0.0
        self._threads_before: int | None = None
        self._fp32 = FullPrecision()

    @classmethod
    def check(cls) -> None:
        """Do nothing: torch is always here."""

    @classmethod
    def _check_options(cls, options: Iterable[str]) -> None:
        if unknown := sorted(set(options) - set(cls.options)):
            known = f"it has {', '.join(cls.options)}" if cls.options else "it has none"
            raise UsageError(f"back-end `{cls.name}` has no option `{unknown[0]}`; {known}")

    @classmethod
    def _load_timed(cls, build: Callable[[], Self], threads: int | None) -> Self:
        """Build a back-end with ``threads`` set, and time it; if it fails, the earlier number is put back."""
        start = time.perf_counter()
        before = torch.get_num_threads()
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            backend = build()
            backend.synchronize()
        except BaseException:
            torch.set_num_threads(before)
            raise
        backend._threads_before = before if threads is not None else None
        backend.load_s = time.perf_counter() - start
        return backend

    def synchronize(self) -> None:
        """Wait for the CUDA device; on a CPU `run` returns when it is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Put torch's settings back; subclasses drop their model first."""
        self._fp32.release()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _place(self) -> str:
        return "cpu" if self.device.type == "cpu" else f"cuda ({torch.cuda.get_device_name(self.device)})"
