"""The progress of a run, as callbacks: a bar over the steps of an epoch, and a line after it."""

import contextlib

from vtk import console
from vtk.training.engine.callbacks import Callback, EpochInfo, EpochStart, StepInfo


class ProgressBar(Callback):
    """A bar for each epoch, with the loss where it is known without waiting for the device."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()

    def on_epoch_start(self, info: EpochStart) -> None:
        """Draw it."""
        title = f"epoch {info.epoch}/{info.epochs}"
        self._bar = self._open.enter_context(console.progress(title, info.images, done=info.images_done))

    def on_step(self, info: StepInfo) -> None:
        """Advance it."""
        self._bar.advance(info.images, "" if info.known_loss is None else f"loss {info.known_loss:.3f}")

    def on_steps_end(self) -> None:
        """Take it away: the evaluation draws one of its own."""
        self._open.close()


class EpochLines(Callback):
    """A line after each epoch.

    Args:
        title: put before it, in a run of several tasks.
        epochs: of the run.
    """

    def __init__(self, title: str, epochs: int) -> None:
        self.title, self.epochs = title, epochs

    def on_epoch(self, info: EpochInfo) -> None:
        """Print it."""
        console.say(f"{self.title}epoch {info.epoch}/{self.epochs}: {info.summary}")
