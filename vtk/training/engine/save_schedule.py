"""Schedules saves within an epoch: every N steps or minutes, and when a signal asks the run to stop."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from vtk.errors import StoppedError
from vtk.training.engine.processes import Ranks, nothing
from vtk.training.engine.result import FitResult, FitState
from vtk.training.options.running import Interval

SIGNALS: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
"""Signals that stop a run cleanly, with Python's own handlers; a handler of the program stays."""

_TOGETHER = 2.0
"""Seconds within which one stop may reach a process twice: from the terminal, and from torchrun."""


class Interrupted(Exception):
    """Raised where a run can stop, after a signal has asked it to."""


@dataclass
class StopSignals:
    """Signals that ask a run to stop. The second one ends the process at once.

    Attributes:
        number: of the signal; 0 before one came.
        several: whether the run has several processes.
    """

    number: int = 0
    several: bool = False
    _first: float = 0.0

    @contextlib.contextmanager
    def listen(self, ranks: Ranks) -> Iterator["StopSignals"]:
        """Listen inside of the context; only the main thread of a process can, elsewhere nothing is changed.

        Evaluations by ``ranks`` end when a signal comes, if there is one process.
        """
        before, self.several = {}, ranks.world > 1
        ranks.check = self.check
        if threading.current_thread() is threading.main_thread():
            before = {number: usual for number, usual in SIGNALS.items() if signal.getsignal(number) == usual}
        for number in before:
            signal.signal(number, self._take)
        try:
            yield self
        finally:
            ranks.check = nothing
            # of several processes the first that ends has torchrun stop the others, which are ending as well
            leaving = self.several and self.number
            for number, usual in before.items():
                signal.signal(number, signal.SIG_IGN if leaving else usual)

    def _take(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.number:
            self.number, self._first = number, now
        elif not self.several or now - self._first > _TOGETHER:
            signal.signal(number, SIGNALS[number])
            os.kill(os.getpid(), number)

    def agreed(self, ranks: Ranks) -> bool:
        """Whether a signal came to any process; all call this at the same time, and get the same answer."""
        if ranks.world == 1:
            return bool(self.number)
        return bool(ranks.sum(torch.tensor(float(bool(self.number)), device=ranks.device)))

    def check(self) -> None:
        """Interrupt the run if it is to stop; several processes continue until they can stop together.

        Raises:
            Interrupted: it is.
        """
        if self.number and not self.several:
            raise Interrupted


def refuse_stopped(result: FitResult, last: Path, ranks: Ranks) -> None:
    """Raise an error where a signal has stopped the run; all processes wait until its state is written.

    Args:
        result: of the run.
        last: the folder of its state.
        ranks: this process and the others.

    Raises:
        StoppedError: says what was done, and how to continue.
    """
    if not result.signal:
        return
    ranks.wait()
    name = "Ctrl-C" if result.signal == signal.SIGINT else signal.Signals(result.signal).name
    done = f"step {result.step} of epoch {result.epoch + 1}" if result.step else f"epoch {result.epoch}"
    line = f"stopped by {name} after {done}, saved in {last}; the same command with --resume continues from there"
    raise StoppedError(line, result.signal)


@dataclass
class Saves:
    """Writes the state of a run within an epoch: when, and how.

    Attributes:
        write: writes it; every process calls it.
        every: steps or time between two saves; None for none but that of a signal.
        signals: that end the run.
    """

    write: Callable[[FitState], None]
    every: Interval | None = None
    signals: StopSignals = field(default_factory=StopSignals)
    _latest: float = field(default_factory=lambda: time.monotonic())

    def at(self, step: int) -> bool:
        """Tell whether to save after step ``step`` of the run, from 1."""
        return self.every is not None and self.every.steps is not None and step % self.every.steps == 0

    def late(self) -> bool:
        """Tell whether the interval is over, by the clock of the main process."""
        seconds = None if self.every is None else self.every.seconds
        return seconds is not None and time.monotonic() - self._latest >= seconds

    def saved(self) -> None:
        """Start the interval anew."""
        self._latest = time.monotonic()
