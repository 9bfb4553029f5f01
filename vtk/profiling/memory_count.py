"""Counts the bytes of weights and live activations of one call on a CPU.

Of torch's back-ends, compiled ones too, every allocation and release of one call is read from torch's profiler: the
peak is the same in every run, which no reading of the process's memory is. Of an ONNX file or an IR the graph is walked
as it stands in the file (`onnx_memory`, `openvino_memory`). Memory that libraries take for themselves is in neither.
"""

import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vtk.runtime.backends.base import Backend, needs_onnx

NOTE = (
    "counted are weights and the images and activations that are alive at once in a call (torch: allocations; ONNX "
    "and IR: the file's graph, unfused), not what libraries take for themselves"
)


@dataclass(frozen=True)
class Counted:
    """Bytes.

    Attributes:
        weights: parameters and buffers, each storage once; None where they cannot be known.
        activations: most that were alive at once in one call, its images included; None where it cannot be counted.
    """

    weights: int | None = None
    activations: int | None = None


def count_memory(
    backend: Backend, call: Callable[[], object], inputs: dict[str, Tensor], file: Path | None = None
) -> Counted:
    """Count what ``call`` of a back-end on a CPU takes.

    Args:
        backend: loaded.
        call: runs it once.
        inputs: of the call.
        file: that the back-end runs, None for a model in torch.
    """
    images = sum(value.nbytes for value in inputs.values())
    if needs_onnx(backend.name):
        if file is None:
            return Counted()
        if file.suffix == ".xml":
            from vtk.profiling.openvino_memory import memory_of_ir as memory_of
        else:
            from vtk.profiling.onnx_memory import memory_of_onnx as memory_of
        called = getattr(backend, "file_name", str)
        weights, live = memory_of(file, {called(n): tuple(v.shape) for n, v in inputs.items()})
        return Counted(weights, None if live is None else live + images)
    live = live_peak(call)
    return Counted(_weights(backend, file), None if live is None else live + images)


def live_peak(call: Callable[[], object]) -> int | None:
    """Return the most bytes that one call of torch had allocated on the CPU at once; None where it cannot be seen."""
    # kineto tells of its start and stop on standard error
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True) as profiler:
            call()
        results: Any = profiler.kineto_results
        events = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    except (RuntimeError, AttributeError):  # somebody profiles already, or another torch
        return None
    now = peak = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        now += change
        peak = max(peak, now)
    return peak


def _weights(backend: Any, file: Path | None) -> int | None:
    if (bank := getattr(backend, "bank", None)) is not None:
        return int(bank.memory().total_bytes)
    model = getattr(backend, "model", None)
    if isinstance(model, nn.Module):
        storages = [t.untyped_storage() for t in (*model.parameters(), *model.buffers())]
        return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}.values())
    if file is None or not zipfile.is_zipfile(file):
        return None
    with zipfile.ZipFile(file) as archive:  # a compiled library holds its weights
        return sum(entry.file_size for entry in archive.infolist())
