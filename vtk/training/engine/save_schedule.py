"""When a run is saved within an epoch: every so many steps or minutes, and when a signal asks it to end."""

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
"""What ends a run in good order, with the handler that Python has for it; where there is another one, it stays."""

_TOGETHER = 2.0
"""Seconds in which a process of several may hear of one stop twice: from the terminal, and from torchrun."""


class Interrupted(Exception):
    """A signal has asked the run to end, and this is a place where it can."""


@dataclass
class StopSignals:
    """Which signal has asked a run to end. The second one ends the process at once.

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
        """Whether a signal came to any process; all ask at the same time, and hear the same."""
        if ranks.world == 1:
            return bool(self.number)
        return bool(ranks.sum(torch.tensor(float(bool(self.number)), device=ranks.device)))

    def check(self) -> None:
        """Leave what is being done if the run is to end; of several processes all go on until they can end together.

        Raises:
            Interrupted: it is.
        """
        if self.number and not self.several:
            raise Interrupted


def refuse_stopped(result: FitResult, last: Path, ranks: Ranks) -> None:
    """Raise what ends a run that a signal has stopped; all processes wait until its state is written.

    Args:
        result: of the run.
        last: the folder of its state.
        ranks: this process and the others.

    Raises:
        StoppedError: says what was done, and how to go on.
    """
    if not result.signal:
        return
    ranks.wait()
    name = "Ctrl-C" if result.signal == signal.SIGINT else signal.Signals(result.signal).name
    done = f"step {result.step} of epoch {result.epoch + 1}" if result.step else f"epoch {result.epoch}"
    line = f"stopped by {name} after {done}, saved in {last}; the same command with --resume goes on from there"
    raise StoppedError(line, result.signal)


@dataclass
class Saves:
    """When the state of a run is written within an epoch, and how.

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
        """Tell whether it is time to save; only the main process's clock counts."""
        seconds = None if self.every is None else self.every.seconds
        return seconds is not None and time.monotonic() - self._latest >= seconds

    def saved(self) -> None:
        """Count the time from here."""
        self._latest = time.monotonic()
