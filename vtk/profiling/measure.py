"""One back-end at one batch size: warm up, compare, time in windows until they agree, compare again."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from vtk.errors import VtkError
from vtk.profiling.compare import Difference, batch_of, compare
from vtk.profiling.inputs import Inputs
from vtk.profiling.memory import Holdings, PeakMemory, available_bytes, is_out_of_memory, release
from vtk.profiling.nvml import Meter, energy_per_image
from vtk.profiling.result import Cell, CellStatus
from vtk.profiling.stats import PERCENTILES, runs_needed, spread, summarise
from vtk.profiling.watch import Compilations
from vtk.runtime.backend import Backend, least_images, most_images

MIN_RUNS = 10
WINDOW_RUNS = 4
WINDOWS = 3
"""A cell has at least so many windows of at least `WINDOW_RUNS` calls each, and is judged by the last of them."""

WINDOW_S, WINDOW_SHARE = 0.5, 20
"""A window takes half a second, or a twentieth of the cell's duration if that is less; longer if its calls do."""

WARMUP_RUNS = 3
WARMUP_S = 0.5
"""Untimed calls before every cell: at least 3 of them and half a second (or the cell's duration, if shorter)."""


@dataclass(frozen=True)
class Plan:
    """What all cells of a profile share.

    Attributes:
        inputs: distinct rows of what is fed.
        reference: their logits (n, classes), fp32, CPU.
        precision: of weights and inputs, a key of `vtk.profiling.compare.MIN_COSINE` or fp32; ``int8`` of a quantised
            file. A back-end that computes otherwise has an attribute ``arithmetic`` that says how.
        duration_s: most timed seconds per cell.
        stability: fraction within which the medians of the last windows agree in a stable cell.
        h2d: whether copies from and to the host are timed.
    """

    inputs: Inputs
    reference: Tensor
    precision: str
    duration_s: float
    stability: float = 0.03
    h2d: Literal["in", "out"] = "out"

    def enough(self, runs: int, timed_s: float) -> bool:
        """Return whether a stable cell may end: it has the runs for the highest percentile its duration has room for.

        Args:
            runs: so far.
            timed_s: seconds they took.
        """
        fit = [n for n in map(runs_needed, PERCENTILES) if n * timed_s / runs <= self.duration_s]
        return runs >= max(fit, default=MIN_RUNS)


class CellRun:
    """A cell while it is measured; `prepare`, then `window` until `over`, then `finish`.

    A wrong output or too little memory ends it with a status; no step raises for them.

    Attributes:
        cell: what is known so far.
        over: nothing more is to be timed.
    """

    def __init__(self, backend: Backend, batch: int, plan: Plan, holdings: Holdings | None = None) -> None:
        self.backend, self.batch, self.plan, self.holdings = backend, batch, plan, holdings
        self.cell = Cell(batch, load_s=backend.load_s)
        self.over = False
        self._inputs: dict[str, Tensor] = {}
        self._windows: list[list[float]] = []
        self._peaks: list[int] = []
        self._meter = Meter(backend.device)
        self._joules: float | None = None

    def prepare(self) -> None:
        """Make the inputs, run once, compare, warm up."""
        fixed, most = self.backend.batch, most_images(self.backend)
        if fixed is not None and self.batch != fixed:
            return self._end("skipped", f"the model takes batches of exactly {fixed}")
        least = least_images(self.backend)
        if not least <= self.batch <= (most or self.batch):
            return self._end("skipped", f"this file takes {least} to {most} images at once")
        release(self.backend.device)
        with self._charged():
            self._guard(self._prepare)

    def window(self, *, alone: bool = True) -> None:
        """Time one more window; not ``alone``: another back-end ran in between, so one call goes before, untimed."""
        self._guard(lambda: self._window(alone))

    def finish(self) -> Cell:
        """Compare the output again, drop the inputs and return the cell."""
        if self.cell.status == "ok":
            self._guard(self._finish)
        with self._charged():
            self._inputs.clear()
        return self.cell

    def call(self) -> Tensor:
        """Run once; may return before the device is done."""
        if self.plan.h2d == "out":
            return self.backend.run(self._inputs)["logits"]
        device = self.backend.device
        inputs = {name: value.to(device, non_blocking=True) for name, value in self._inputs.items()}
        return self.backend.run(inputs)["logits"].to("cpu")

    def _prepare(self) -> None:
        given = self.plan.inputs
        rows = {given.name: given.images, **given.more}
        need, free = self.batch * given.images[0].nbytes, available_bytes(self.backend.device)
        if need > free:
            raise MemoryError(f"the images alone take {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
        on_host = self.plan.h2d == "in"
        for name, distinct in rows.items():
            made = batch_of(distinct, self.batch)
            if made.is_floating_point():
                made = made.to(self.backend.dtype)
            if on_host and self.backend.device.type == "cuda":
                made = made.pin_memory()
            self._inputs[name] = made if on_host else made.to(self.backend.device)
        self.backend.synchronize()
        start = time.perf_counter()
        output = self.call()
        self.backend.synchronize()
        self.cell = replace(self.cell, first_s=time.perf_counter() - start)
        if self._compared(output):
            warm_up(self.call, self.backend.synchronize, min(WARMUP_S, self.plan.duration_s))

    def _window(self, alone: bool) -> None:
        if not alone:
            warm_up(self.call, self.backend.synchronize, 0.0, runs=1)
        seen = Compilations()
        foreign = self.backend.name.startswith("ort") or self.backend.name == "tensorrt"
        peak = PeakMemory(self.backend.device, torch_allocator=not foreign)
        before = self._meter.read()
        peak.start()
        seen.start()
        try:
            length = min(WINDOW_S, self.plan.duration_s / WINDOW_SHARE)
            seconds = time_calls(self.call, self.backend.synchronize, length, least=WINDOW_RUNS)
        finally:
            recompiles = seen.stop()
        memory, after = peak.stop(), self._meter.read()
        if memory is not None:
            others = 0 if self.holdings is None else self.holdings.of_others(self.backend.name)
            self._peaks.append(max(0, memory - others))
        if before.energy_j is not None and after.energy_j is not None:
            self._joules = (self._joules or 0.0) + after.energy_j - before.energy_j
        first = self.cell.clock_before_mhz if self._windows else before.clock_mhz
        self._windows.append(seconds)
        differ = spread(self._windows, WINDOWS)
        stable = None if differ is None else differ <= self.plan.stability
        self.cell = replace(
            self.cell, windows=len(self._windows), spread=differ, stable=stable, clock_before_mhz=first,
            clock_after_mhz=after.clock_mhz, recompiles=self.cell.recompiles + recompiles,
        )  # fmt: skip
        runs, timed = sum(map(len, self._windows)), sum(map(sum, self._windows))
        done = timed >= self.plan.duration_s or (bool(stable) and self.plan.enough(runs, timed))
        self.over = done and len(self._windows) >= WINDOWS and runs >= MIN_RUNS

    def _finish(self) -> None:
        # a back-end that reuses its buffers can be right once and wrong later
        output = self.call()
        self.backend.synchronize()
        if not self._compared(output, "right at first, after the timed runs "):
            return
        seconds = [s for window in self._windows for s in window]
        energy = energy_per_image(self._joules, sum(seconds), self.batch * len(seconds))
        self.cell = replace(
            self.cell, **vars(summarise(seconds, self.batch)), energy_per_image_j=energy,
            peak_memory_bytes=max(self._peaks, default=None),
        )  # fmt: skip

    def _compared(self, output: Tensor, when: str = "") -> bool:
        kind = getattr(self.backend, "arithmetic", "") or self.plan.precision
        found: Difference = compare(output, self.plan.reference, kind)
        if found.ok:
            worst = max(found.max_diff or 0.0, self.cell.max_diff or 0.0)
            self.cell = replace(self.cell, max_diff=worst, tolerance=found.tolerance)
        else:
            known = Cell(self.batch, load_s=self.cell.load_s)
            self.cell = replace(known, max_diff=found.max_diff, tolerance=found.tolerance)
            self._end("mismatch", f"wrong output, not timed: {when}{found.reason}")
        return found.ok

    def _charged(self) -> AbstractContextManager[None]:
        return nullcontext() if self.holdings is None else self.holdings.charge(self.backend.name)

    def _guard(self, step: Callable[[], None]) -> None:
        try:
            step()
            return
        except VtkError:
            raise
        except Exception as error:  # one bad cell must not cost the hour of measurements before it
            full = is_out_of_memory(error)
            text = f"out of memory: {first_line(error)}" if full else f"{type(error).__name__}: {first_line(error)}"
        self.cell = Cell(self.batch, load_s=self.backend.load_s)
        self._end("oom" if full else "failed", text)
        # here the error is gone, and with it the frames that held the tensors
        release(self.backend.device, collect=True)

    def _end(self, status: CellStatus, reason: str) -> None:
        self.cell = replace(self.cell, status=status, reason=reason)
        self.over = True
        self._inputs.clear()


def warm_up(
    call: Callable[[], object], synchronize: Callable[[], None], duration_s: float, *, runs: int = WARMUP_RUNS
) -> None:
    """Call at least ``runs`` times and ``duration_s`` seconds, until caches, clocks and autotuners have settled."""
    end = time.perf_counter() + duration_s
    done = 0
    while done < runs or time.perf_counter() < end:
        call()
        synchronize()
        done += 1


def time_calls(
    call: Callable[[], object], synchronize: Callable[[], None], duration_s: float, *, least: int = MIN_RUNS
) -> list[float]:
    """Return the wall time in seconds of each call, from start until the device is done.

    Stops after ``duration_s`` seconds, but not before ``least`` calls.
    """
    clock = time.perf_counter
    seconds: list[float] = []
    synchronize()
    end = clock() + duration_s
    while True:
        start = clock()
        call()
        synchronize()
        now = clock()
        seconds.append(now - start)
        if now >= end and len(seconds) >= least:
            return seconds


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, short enough for a table."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if len(text) <= 200 else text[:199] + "…"
