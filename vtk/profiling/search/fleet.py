"""Measures setups: all instances of one run at the same time, each in a process, and only then are calls timed."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vtk._path import child
from vtk.errors import VtkError
from vtk.profiling.calls import first_line
from vtk.profiling.memory import available_bytes
from vtk.profiling.search.instance import LEAST_CALLS, receive, send
from vtk.profiling.search.setup import FULL, Reading, Setup
from vtk.profiling.search.variants import Variant

COPIES = 2.5
"""Memory of a loaded model, in sizes of its weights: a runtime keeps them in its own layout, and scratch memory."""

MOST_HELD = 8
"""Loaded back-ends that an instance keeps."""

HOPELESS = 3
"""A setup whose first calls all take so many times the budget is not measured further."""

_SOON = 0.003
"""Seconds between a request to begin and the beginning, so that all instances have got it."""

Tell = Callable[[Setup], None]


class InstanceError(VtkError):
    """An instance cannot run a setup; the text says why."""


@dataclass(frozen=True)
class Calls:
    """What all setups are called with, and for how long.

    Attributes:
        inputs: distinct rows of every input of the model.
        reference: their logits (n, classes), fp32, CPU.
        probabilities: these are logarithms of probabilities.
        duration_s: of a complete measurement.
        budget_ms: where `hasty`, first calls far beyond it are not followed by others.
        hasty: as above.
    """

    inputs: Mapping[str, Tensor]
    reference: Tensor
    probabilities: bool
    duration_s: float
    budget_ms: float
    hasty: bool = True

    @property
    def window_s(self) -> float:
        """Seconds of one window."""
        return self.duration_s / FULL


class Fleet:
    """The processes of a search.

    Args:
        variants: that setups name.
        calls: of all setups.
        weights: bytes of one copy of the model's weights.
        readings: of all setups; what is measured is put there.
        tell: called with each setup whose windows were measured.

    Attributes:
        reasons: why setups failed.
        wrong: setups whose answers were wrong.
    """

    def __init__(
        self, variants: Mapping[tuple[str, str], Variant], calls: Calls, weights: int, readings: dict[Setup, Reading],
        tell: Tell = lambda setup: None,
    ) -> None:  # fmt: skip
        self.variants, self.calls, self.weights = variants, calls, weights
        self.readings, self.tell = readings, tell
        self.reasons: dict[Setup, str] = {}
        self.wrong: set[Setup] = set()
        self._running: list[_Process] = []
        self._chosen: Setup | None = None

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.close()
        self._running.clear()

    def measure(self, wanted: Sequence[tuple[Setup, int]]) -> None:
        """Add windows to the readings of setups: (setup, windows) each; they take turns."""
        left = dict(wanted)
        while left:
            for setup in tuple(left):
                left[setup] -= 1
                start = time.perf_counter()
                try:
                    calls = self._window(setup)
                except InstanceError as error:
                    self.reasons[setup], self._chosen = str(error), None
                    del left[setup]
                    continue
                reading = self.readings.setdefault(setup, Reading())
                reading.add(calls)
                reading.seconds += time.perf_counter() - start
                if not left[setup]:
                    del left[setup]
                    self.tell(setup)

    def _window(self, setup: Setup) -> list[float]:
        """Return the milliseconds of one window's calls, of all instances."""
        processes = self._ready(setup)
        if self._chosen != setup:
            self._choose(setup, processes)
        # the instances are busy together here, too, and their clocks rise
        warm = self._together(processes, self.calls.window_s / 8, 3)
        typical = min(warm)
        if self.calls.hasty and typical > HOPELESS * self.calls.budget_ms:
            return warm
        found = self._together(processes, max(self.calls.window_s, LEAST_CALLS * typical / 1000), LEAST_CALLS)
        wrong = next(filter(None, _all(processes, "wrong")), "")
        if wrong:
            self.wrong.add(setup)
            raise InstanceError(f"wrong output in the timed runs: {wrong}")
        return found

    def _together(self, processes: Sequence["_Process"], seconds: float, least: int) -> list[float]:
        start = time.perf_counter() + _SOON
        return [ms for calls in _all(processes, "calls", start, start + seconds, least) for ms in calls]

    def _ready(self, setup: Setup) -> list["_Process"]:
        """Return the instances of a setup with its model loaded.

        Raises:
            InstanceError: it does not fit into memory, or cannot be loaded.
        """
        # one process more for each instance that is new; one that ended is replaced
        self._running = [process for process in self._running if process.alive]
        new = setup.instances - len(self._running)
        if new > 0:
            self._chosen = None
            self._running += [_Process() for _ in range(new)]
            _all(self._running[-new:], "begin", dict(self.calls.inputs), self.calls.reference, self.calls.probabilities)
        processes = self._running[: setup.instances]
        key = (*setup.variant, setup.threads)
        missing = [process for process in processes if key not in process.held]
        if missing:
            self._chosen = None
            held = self._held(setup, len(missing))
            _all(missing, "load", self.variants[setup.variant], setup.threads, held)
            for process in missing:
                process.held = [*process.held, key][-held:]
        return processes

    def _held(self, setup: Setup, new: int) -> int:
        """Return how many back-ends an instance may keep, the new one included."""
        one = max(int(COPIES * self.weights), 1)
        free = available_bytes(torch.device("cpu"))
        held = max(len(process.held) for process in self._running[: setup.instances])
        if new * one <= free // 2:
            return min(held + 1, MOST_HELD)
        if new * one > free + held * new * one:
            raise InstanceError(f"not tried: {setup.instances} instances would take about {new * one / 1e9:.1f} GB, "
                                f"{free / 1e9:.1f} GB are free")  # fmt: skip
        return 1

    def _choose(self, setup: Setup, processes: Sequence["_Process"]) -> None:
        variant = self.variants[setup.variant]
        kind = variant.kind
        if variant.source is not None and variant.source.facts.preprocessing:
            kind = "raw" if kind == "fp32" else kind
        wrong = next(filter(None, _all(processes, "choose", variant, setup.threads, setup.batch, kind)), "")
        if wrong:
            self.wrong.add(setup)
            raise InstanceError(f"wrong output: {wrong}")
        self._chosen = setup


def _all(processes: Sequence["_Process"], name: str, *arguments: Any) -> list[Any]:
    """Ask all processes at the same time and return their answers.

    Raises:
        InstanceError: the first error; every answer was read.
    """
    sent = [process.send(name, arguments) for process in processes]
    answers = [
        process.receive() if alive else (False, process.death()) for process, alive in zip(processes, sent, strict=True)
    ]
    if (failed := next((text for ok, text in answers if not ok), None)) is not None:
        raise InstanceError(str(failed))
    return [value for _, value in answers]


class _Process:
    """An instance's process and the names of what it has loaded."""

    def __init__(self) -> None:
        root = [str(Path(__file__).parents[3]), *sys.path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in root if part)}
        code = "from vtk.profiling.search.instance import main; main()"
        self.process = subprocess.Popen(
            child("-c", code), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self.held: list[tuple[object, ...]] = []

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def send(self, name: str, arguments: tuple[Any, ...]) -> bool:
        """Send a request; False if the process has ended."""
        assert self.process.stdin is not None
        try:
            data = pickle.dumps((name, arguments))
        except Exception as error:  # a module in memory may hold what cannot be copied to another process
            raise InstanceError(f"the model cannot be sent to another process: {first_line(error)}") from error
        try:
            send(self.process.stdin, data)  # type: ignore[arg-type]
        except OSError:
            return False
        return True

    def receive(self) -> tuple[bool, Any]:
        """Return whether a request succeeded, and its result or the error's text."""
        assert self.process.stdout is not None
        try:
            answer: tuple[bool, Any] = pickle.loads(receive(self.process.stdout))  # type: ignore[arg-type]
        except EOFError:
            return False, self.death()
        return answer

    def death(self) -> str:
        """Say how the process ended."""
        code = self.process.wait()
        why = f"by signal {-code}, perhaps for want of memory" if code < 0 else f"with code {code}"
        return f"an instance ended {why}"

    def close(self) -> None:
        """End the process by the end of its requests."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
