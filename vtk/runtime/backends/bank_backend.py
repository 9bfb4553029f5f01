"""Runs one pack, or several of one base, in a `vtk.bank.TaskBank`: the packed forward pass that servers use."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from vtk.errors import UnavailableError, UsageError
from vtk.packs.load import Task
from vtk.runtime.backends.fused_backend import note_graph
from vtk.runtime.backends.torch_base import TorchBackend
from vtk.runtime.source import Source


class BankBackend(TorchBackend):
    """A bank that is called with images of the source's task only; other tasks are in memory beside it."""

    name = "bank"
    options = ("tasks",)
    graphs: bool | None = None

    def __init__(self, bank: Any, task: str, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.bank, self.task = bank, task

    @classmethod
    def load(
        cls, source: Source, *, device: torch.device, dtype: torch.dtype, threads: int | None, **options: Any
    ) -> Self:
        """Load the pack into a new bank; options: `tasks`, folders of more packs of the same base."""
        if source.kind != "pack" or source.path is None:
            raise UsageError(f"`{cls.name}` holds task packs, not the {source.kind} {source.name}; give a pack")
        cls._check_options(options)
        others: Sequence[str] = options.get("tasks", ())
        return cls._load_timed(lambda: cls._fill(source, others, device, dtype), threads)

    @classmethod
    def _fill(cls, source: Source, others: Sequence[str], device: torch.device, dtype: torch.dtype) -> Self:
        """Return a bank of a source's pack and of the packs in ``others``."""
        from vtk.bank import TaskBank

        bank = TaskBank(source.base, device=device, dtype=dtype, graphs=cls.graphs)
        held = source.held if isinstance(source.held, Task) else None
        if (graphs := getattr(bank, "graphs", None)) is not None:
            graphs.notice = note_graph
        bank.add(source.name, source.path if held is None else dataclasses.replace(held, model=source.model()))
        for number, path in enumerate(others, 2):
            bank.add(f"{number}: {path}", path)
        return cls(bank, source.name, device, dtype)

    @property
    def provider(self) -> str:
        """``bank of N tasks, cpu`` or ``… cuda (NAME)``, and ``, graph`` if calls replay CUDA graphs."""
        count = len(self.bank.tasks)
        replayed = self.graphs or getattr(self.bank, "graphs", None) is not None
        return f"bank of {count} task{'s' * (count != 1)}, {self._place()}{', graph' if replayed else ''}"

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Map ``pixel_values`` (B, 3, H, W), any floating type and device, to ``logits`` (B, classes)."""
        with torch.inference_mode():
            logits: Tensor = self.bank({self.task: inputs["pixel_values"]})[self.task]
            return {"logits": logits}

    def close(self) -> None:
        """Drop the bank and put torch's settings back."""
        self.bank = None
        super().close()


class BankGraphBackend(BankBackend):
    """A bank whose calls must replay CUDA graphs; `bank` does so where it can."""

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
        """Load as `BankBackend` does, on CUDA in fp16 or bf16: other precisions have no kernels to capture."""
        if device.type != "cuda":
            raise UnavailableError(f"`bank+graph` replays CUDA graphs; on {device} use bank")
        if dtype.itemsize != 2:
            raise UsageError("`bank+graph` captures the kernels of fp16 and bf16; give one as --precision, or use bank")
        return super().load(source, device=device, dtype=dtype, threads=threads, **options)


class BankNoGraphBackend(BankBackend):
    """A bank without CUDA graphs."""

    name = "bank+nograph"
    graphs = False
