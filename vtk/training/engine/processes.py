"""The processes of a run: one, or several joined by Accelerate, each with its own device."""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vtk.errors import UnavailableError, UsageError
from vtk.packages import require


def nothing() -> None:
    """Do nothing."""


class Ranks:
    """A single process on one device; also the interface of `AccelerateRanks`.

    Attributes:
        rank: number of this process.
        world: number of processes.
        device: of this process.
        check: called between the batches of an evaluation; what it raises ends it.
    """

    def __init__(self, device: torch.device, rank: int = 0, world: int = 1) -> None:
        self.device, self.rank, self.world = device, rank, world
        self.check: Callable[[], None] = nothing

    @property
    def main(self) -> bool:
        """Whether this process writes files and talks."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return what to call in training: gradients of all processes are averaged."""
        return model

    @contextlib.contextmanager
    def no_sync(self, wrapped: nn.Module) -> Iterator[None]:
        """Leave out the averaging of gradients: for all but the last pass of an accumulated step."""
        yield

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over all processes."""
        return value

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over all processes, in place; every process gives the same shapes."""

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, in order of rank."""
        return [value]

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Overwrite ``tensors`` with those of the main process."""

    def wait(self) -> None:
        """Wait until all processes are here."""


class AccelerateRanks(Ranks):
    """Several processes, started by torchrun or ``accelerate launch``: DistributedDataParallel through Accelerate."""

    def __init__(self, cpu: bool) -> None:
        # imported here because a single process does not need it, and it takes a second
        require("accelerate")
        accelerate = importlib.import_module("accelerate")
        ddp = accelerate.DistributedDataParallelKwargs(broadcast_buffers=False)
        self.accelerator = accelerate.Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[ddp])
        expected = int(os.environ["WORLD_SIZE"])
        if self.accelerator.num_processes != expected:
            raise UsageError(
                f"{expected} processes were started, {self.accelerator.num_processes} are connected; start them with "
                "torchrun --standalone --nproc_per_node N -m vtk finetune …"
            )
        if "FSDP" in str(self.accelerator.distributed_type) or "DEEPSPEED" in str(self.accelerator.distributed_type):
            kind = self.accelerator.distributed_type
            raise UsageError(f"{kind} is not in this version; start the processes with torchrun, for DDP")
        super().__init__(self.accelerator.device, self.accelerator.process_index, expected)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model in DistributedDataParallel."""
        wrapped: nn.Module = self.accelerator.prepare_model(model)
        return wrapped

    @contextlib.contextmanager
    def no_sync(self, wrapped: nn.Module) -> Iterator[None]:
        """Leave out the averaging of gradients."""
        with self.accelerator.no_sync(wrapped):
            yield

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over all processes."""
        total: Tensor = self.accelerator.reduce(value, reduction="sum")
        return total

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over all processes, in place: in one message for each type, small tensors would wait for each."""
        for dtype in {t.dtype: None for t in tensors}:
            same = [t for t in tensors if t.dtype == dtype]
            flat = torch.cat([t.flatten() for t in same])
            torch.distributed.all_reduce(flat)
            for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, in order of rank."""
        values: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(values, value)
        return values

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Overwrite ``tensors`` with those of the main process."""
        for tensor in tensors:
            torch.distributed.broadcast(tensor, src=0)

    def wait(self) -> None:
        """Wait until all processes are here."""
        self.accelerator.wait_for_everyone()


def find_device(text: str) -> torch.device:
    """Return the device called ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UsageError: another name.
        UnavailableError: CUDA, or the device of that number, is not available.
    """
    kind, _, number = text.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and (kind != "cuda" or not number.isdigit())):
        raise UsageError(f"`--device` {text} is not known; choose auto, cpu, cuda or cuda:N")
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= here:
        raise UnavailableError(f"`--device` {text}: {here} CUDA devices are usable here; see vtk doctor, or use cpu")
    if kind == "cpu" or not here:
        return torch.device("cpu")
    return torch.device("cuda", int(number or 0))


def open_ranks(device: str) -> Ranks:
    """Join the other processes of this run, if torchrun started any.

    Raises:
        UsageError: the processes are not connected, or the device has no known name.
        UnavailableError: the device is not available.
    """
    local = find_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks(local)
    if ":" in device:
        raise UsageError(f"`--device` {device}: with several processes each takes its own GPU; give cuda or cpu")
    return AccelerateRanks(cpu=local.type == "cpu")
