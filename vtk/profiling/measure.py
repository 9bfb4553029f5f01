"""One back-end at one batch size: warm up, compare, time, compare again."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vtk.profiling.compare import Difference, batch_of, compare
from vtk.profiling.memory import PeakMemory, available_bytes, is_out_of_memory, release
from vtk.profiling.result import Cell
from vtk.profiling.stats import summarise
from vtk.runtime.backend import Backend

MAX_RUNS = 1000
MIN_RUNS = 10
WARMUP_RUNS = 3
WARMUP_S = 0.5
"""Untimed calls before every cell: at least 3 of them and half a second (or the cell's duration, if shorter)."""


@dataclass(frozen=True)
class Plan:
    """What all cells of a profile share.

    Attributes:
        images: distinct images (n, C, H, W), fp32, CPU.
        reference: their logits (n, classes), fp32, CPU.
        precision: of weights and inputs.
        duration_s: per cell.
        max_runs: per cell.
    """

    images: Tensor
    reference: Tensor
    precision: str
    duration_s: float
    max_runs: int = MAX_RUNS


def measure_cell(backend: Backend, batch: int, plan: Plan) -> Cell:
    """Measure ``backend`` at ``batch`` images; a wrong output or too little memory is a cell, not an exception."""
    if backend.batch is not None and batch != backend.batch:
        return Cell(batch, "skipped", f"the model takes batches of exactly {backend.batch}")
    release(backend.device)
    try:
        need, free = batch * plan.images[0].nbytes, available_bytes(backend.device)
        if need > free:
            raise MemoryError(f"the images alone take {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
        return _measure(backend, batch, plan)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        cell = Cell(batch, "oom", f"out of memory: {first_line(error)}", load_s=backend.load_s)
    release(backend.device, collect=True)  # here the error is gone, and with it the frames that held the tensors
    return cell


def _measure(backend: Backend, batch: int, plan: Plan) -> Cell:
    inputs = {"pixel_values": batch_of(plan.images, batch).to(backend.device, backend.dtype)}
    cell = Cell(batch, load_s=backend.load_s)

    def call() -> Tensor:
        return backend.run(inputs)["logits"]

    def compared(when: str) -> Difference:
        difference = compare(output, plan.reference, plan.precision)
        return difference if difference.ok else replace(difference, reason=f"{when}{difference.reason}")

    backend.synchronize()
    start = time.perf_counter()
    output = call()
    backend.synchronize()
    first_s = time.perf_counter() - start
    before = compared("")
    if not before.ok:
        return _mismatch(cell, before)
    peak = PeakMemory(backend.device, torch_allocator=not backend.name.startswith("ort"))
    warm_up(call, backend.synchronize, min(WARMUP_S, plan.duration_s))
    peak.start()
    seconds = time_calls(call, backend.synchronize, plan.duration_s, plan.max_runs)
    memory = peak.stop()
    # a back-end that reuses its buffers can be right once and wrong later
    output = call()
    backend.synchronize()
    after = compared("right at first, after the timed runs ")
    if not after.ok:
        return _mismatch(cell, after)
    worst = max(before.max_diff or 0.0, after.max_diff or 0.0)
    latency = vars(summarise(seconds, batch))
    return replace(
        cell, **latency, peak_memory_bytes=memory, first_s=first_s, max_diff=worst, tolerance=before.tolerance
    )


def warm_up(call: Callable[[], object], synchronize: Callable[[], None], duration_s: float) -> None:
    """Call until caches, clocks and autotuners have settled."""
    end = time.perf_counter() + duration_s
    runs = 0
    while runs < WARMUP_RUNS or time.perf_counter() < end:
        call()
        synchronize()
        runs += 1


def time_calls(
    call: Callable[[], object], synchronize: Callable[[], None], duration_s: float, max_runs: int = MAX_RUNS
) -> list[float]:
    """Return the wall time in seconds of each call, from start until the device is done.

    Stops at ``max_runs`` calls or after ``duration_s`` seconds, but not before `MIN_RUNS` calls.
    """
    clock = time.perf_counter
    seconds: list[float] = []
    synchronize()
    end = clock() + duration_s
    while len(seconds) < max_runs:
        start = clock()
        call()
        synchronize()
        now = clock()
        seconds.append(now - start)
        if now >= end and len(seconds) >= MIN_RUNS:
            break
    return seconds


def predicted_shortage(cells: list[Cell], batch: int, device: torch.device) -> str:
    """Say why ``batch`` would not fit, judging by how memory grew over two smaller batches; empty if it should.

    Needed on a CPU: Linux does not refuse memory, it kills the process that uses it.
    """
    known = [(c.batch, c.peak_memory_bytes) for c in cells if c.status == "ok" and c.peak_memory_bytes is not None]
    if device.type != "cpu" or len(known) < 2:
        return ""
    (small, low), (large, high) = known[-2], known[-1]
    more = int((high - low) / (large - small) * (batch - large))
    free = available_bytes(device)
    if more <= free:
        return ""
    return f"would need about {more / 1e9:.1f} GB more than batch {large}, {free / 1e9:.1f} GB are free"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, short enough for a table."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if len(text) <= 200 else text[:199] + "…"


def _mismatch(cell: Cell, difference: Difference) -> Cell:
    return replace(
        cell,
        status="mismatch",
        reason=f"wrong output, not timed: {difference.reason}",
        max_diff=difference.max_diff,
        tolerance=difference.tolerance,
    )
