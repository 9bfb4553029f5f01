"""Measures one back-end at one batch size: warm-up, comparison, timing in windows until stable, comparison."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from vtk.errors import VtkError
from vtk.profiling.calls import MIN_RUNS, WARMUP_S, first_line, time_calls, warm_up
from vtk.profiling.cells import Cell, CellStatus
from vtk.profiling.compare import Difference, batch_of, centred, compare, gives_probabilities, loosest
from vtk.profiling.compile_watch import Compilations
from vtk.profiling.inputs import Inputs
from vtk.profiling.memory import Holdings, PeakMemory, available_bytes, is_out_of_memory, release
from vtk.profiling.memory_count import count_memory
from vtk.profiling.nvml import Meter, energy_per_image
from vtk.profiling.stats import PERCENTILES, runs_needed, spread, summarise
from vtk.runtime.backends.base import Backend, least_images, most_images

WINDOW_RUNS = 4
WINDOWS = 3
"""A cell has at least so many windows of at least `WINDOW_RUNS` calls each, and is judged by the last of them."""

WINDOW_S, WINDOW_SHARE = 0.5, 20
"""A window takes half a second, or a twentieth of the cell's duration if that is less; longer if its calls do."""

VARIANTS = 2
"""Batches of different images that calls take turns with."""


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
        probabilities: `reference` holds logarithms of probabilities.
    """

    inputs: Inputs
    reference: Tensor
    precision: str
    duration_s: float
    stability: float = 0.03
    h2d: Literal["in", "out"] = "out"
    probabilities: bool = False

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

    Calls take turns with different images, and the last output of every window is compared, when the window is over: a
    back-end that reuses its buffers, or keeps answers, can be right at first and wrong when it is busy. A wrong output
    or too little memory ends the cell with a status; no step raises for them.

    Attributes:
        cell: what is known so far.
        over: nothing more is to be timed.
    """

    def __init__(
        self, backend: Backend, batch: int, plan: Plan, holdings: Holdings | None = None, file: Path | None = None
    ) -> None:
        self.backend, self.batch, self.plan, self.holdings, self.file = backend, batch, plan, holdings, file
        self.cell = Cell(batch, load_s=backend.load_s)
        self.over = False
        self._inputs: list[dict[str, Tensor]] = []
        self._turn = -1
        self._last: Tensor | None = None
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
            self._last = None
        return self.cell

    def call(self) -> Tensor:
        """Run once, with other images than the call before; may return before the device is done."""
        self._turn += 1
        inputs = self._inputs[self._turn % VARIANTS]
        if self.plan.h2d == "in":
            device = self.backend.device
            inputs = {name: value.to(device, non_blocking=True) for name, value in inputs.items()}
        self._last = self.backend.run(inputs)["logits"]
        if self.plan.h2d == "in":
            self._last = self._last.to("cpu")
        return self._last

    def _prepare(self) -> None:
        given = self.plan.inputs
        need, free = VARIANTS * self.batch * given.images[0].nbytes, available_bytes(self.backend.device)
        if need > free:
            raise MemoryError(f"the images alone take {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
        self._inputs = [self._images(variant) for variant in range(VARIANTS)]
        self.backend.synchronize()
        start = time.perf_counter()
        self.call()
        self.backend.synchronize()
        self.cell = replace(self.cell, first_s=time.perf_counter() - start)
        if not self._matches():
            return
        if getattr(self.backend, "simulated", False):
            close = f"the outputs are right (max |diff| {self.cell.max_diff:.3g})"
            return self._end("skipped", f"{close}, and a simulation on the CPU has no time")
        if self.backend.device.type == "cpu":
            self._last = None  # what is freed in the call must have been allocated in it
            counted = count_memory(self.backend, self.call, self._inputs[0], self.file)
            self.cell = replace(self.cell, weight_bytes=counted.weights, activation_bytes=counted.activations)
        warm_up(self.call, self.backend.synchronize, min(WARMUP_S, self.plan.duration_s))
        self._matches("right at first, in the warm-up ")

    def _images(self, variant: int) -> dict[str, Tensor]:
        """Return a batch whose every row is another image than in the other variants'."""
        given, on_host = self.plan.inputs, self.plan.h2d == "in"
        made: dict[str, Tensor] = {}
        for name, distinct in {given.name: given.images, **given.more}.items():
            value = batch_of(distinct.roll(-variant, 0), self.batch)
            if value.is_floating_point():
                value = value.to(self.backend.dtype)
            if on_host and self.backend.device.type == "cuda":
                value = value.pin_memory()
            made[name] = value if on_host else value.to(self.backend.device)
        return made

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
            if self.backend.device.type == "cuda" and self.plan.h2d == "out":  # the images of the other turns
                others += sum(value.nbytes for inputs in self._inputs[1:] for value in inputs.values())
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
        if not self._matches("right at first, in the timed runs "):
            return
        runs, timed = sum(map(len, self._windows)), sum(map(sum, self._windows))
        done = timed >= self.plan.duration_s or (bool(stable) and self.plan.enough(runs, timed))
        self.over = done and len(self._windows) >= WINDOWS and runs >= MIN_RUNS

    def _finish(self) -> None:
        for _ in range(VARIANTS):
            self.call()
            self.backend.synchronize()
            if not self._matches("right at first, after the timed runs "):
                return
        seconds = [s for window in self._windows for s in window]
        peak, cuda = max(self._peaks, default=None), self.backend.device.type == "cuda"
        energy = energy_per_image(self._joules, sum(seconds), self.batch * len(seconds))
        self.cell = replace(
            self.cell, **vars(summarise(seconds, self.batch)), energy_per_image_j=energy,
            peak_memory_bytes=peak if cuda else None, process_bytes=None if cuda else peak,
        )  # fmt: skip

    def _matches(self, when: str = "") -> bool:
        """Hold the last call's output against the reference of its images."""
        assert self._last is not None
        kind = loosest(self.plan.precision, getattr(self.backend, "arithmetic", ""))
        got, want = self._last, self.plan.reference.roll(-(self._turn % VARIANTS), 0)
        if self.plan.probabilities or gives_probabilities(self.backend):
            half = self.backend.dtype.itemsize == 2
            got, want = centred(got, half=half), centred(want, half=half)
        found: Difference = compare(got, want, kind)
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
        self._last = None
