"""One pack, or several of one base, in a `vtk.bank.TaskBank`: the packed forward pass that servers use."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from vtk.errors import UnavailableError, UsageError
from vtk.models.fp32 import FullPrecision
from vtk.packs.load import Task
from vtk.runtime.backends.fused_backend import note_graph
from vtk.runtime.source import Source


class BankBackend:
    """A bank that is called with images of one of its tasks, the source's; the others are in memory beside it.

    ``threads`` is torch's global number; `close` puts the earlier one back.
    """

    name = "bank"
    batch: int | None = None
    options = ("tasks",)
    graphs: bool | None = None

    def __init__(self, bank: Any, task: str, device: torch.device, dtype: torch.dtype) -> None:
        self.bank, self.task, self.device, self.dtype = bank, task, device, dtype
        self.load_s = 0.0
        self._fp32 = FullPrecision()
        self._threads_before: int | None = None

    @classmethod
    def check(cls) -> None:
        """Do nothing: a bank runs wherever torch does."""

    @classmethod
    def load(
        cls, source: Source, *, device: torch.device, dtype: torch.dtype, threads: int | None, **options: Any
    ) -> Self:
        """Put the pack into a new bank; options: `tasks`, folders of more packs of the same base."""
        from vtk.bank import TaskBank

        if source.kind != "pack" or source.path is None:
            raise UsageError(f"`{cls.name}` holds task packs, not the {source.kind} {source.name}; give a pack")
        if unknown := sorted(set(options) - set(cls.options)):
            raise UsageError(f"back-end `{cls.name}` has no option `{unknown[0]}`; it has {', '.join(cls.options)}")
        others: Sequence[str] = options.get("tasks", ())
        start = time.perf_counter()
        before = torch.get_num_threads()
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            bank = TaskBank(source.base, device=device, dtype=dtype, graphs=cls.graphs)
            held = source.held if isinstance(source.held, Task) else None
            if (graphs := getattr(bank, "graphs", None)) is not None:
                graphs.notice = note_graph
            bank.add(source.name, source.path if held is None else dataclasses.replace(held, model=source.model()))
            for number, path in enumerate(others, 2):
                bank.add(f"{number}: {path}", path)
            backend = cls(bank, source.name, device, dtype)
            backend.synchronize()
        except BaseException:
            torch.set_num_threads(before)
            raise
        backend._threads_before = before if threads is not None else None
        backend.load_s = time.perf_counter() - start
        return backend

    @property
    def provider(self) -> str:
        """``bank of N tasks, cpu`` or ``… cuda (NAME)``, and ``, graph`` where calls are replayed."""
        count = len(self.bank.tasks)
        replayed = self.graphs or getattr(self.bank, "graphs", None) is not None
        cpu = self.device.type == "cpu"
        where = "cpu" if cpu else f"cuda ({torch.cuda.get_device_name(self.device)})"
        return f"bank of {count} task{'s' * (count != 1)}, {where}{', graph' if replayed else ''}"

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Map ``pixel_values`` (B, 3, H, W), any floating type and device, to ``logits`` (B, classes)."""
        with torch.inference_mode():
            logits: Tensor = self.bank({self.task: inputs["pixel_values"]})[self.task]
            return {"logits": logits}

    def synchronize(self) -> None:
        """Wait for the CUDA device; on a CPU `run` returns when it is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Drop the bank and put torch's number of threads back."""
        self.bank = None
        self._fp32.release()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class BankGraphBackend(BankBackend):
    """The same where calls must be replayed as CUDA graphs; `bank` does so where it can."""

    name = "bank+graph"
    graphs = True

    @classmethod
    def check(cls) -> None:
        """Refuse to work without CUDA, whose graphs these are."""
        if not torch.cuda.is_available():
            raise UnavailableError("`bank+graph` replays CUDA graphs and torch sees no CUDA device here; use bank")

    @classmethod
    def load(
        cls, source: Source, *, device: torch.device, dtype: torch.dtype, threads: int | None, **options: Any
    ) -> Self:
        """As of `BankBackend`, on CUDA in fp16 or bf16: other precisions have no kernels that can be captured."""
        if device.type != "cuda":
            raise UnavailableError(f"`bank+graph` replays CUDA graphs; on {device} use bank")
        if dtype.itemsize != 2:
            raise UsageError("`bank+graph` captures the kernels of fp16 and bf16; give one as --precision, or use bank")
        return super().load(source, device=device, dtype=dtype, threads=threads, **options)


class BankNoGraphBackend(BankBackend):
    """The same without graphs."""

    name = "bank+nograph"
    graphs = False
