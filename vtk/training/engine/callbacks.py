"""The callback interface of a run: methods called after each step, each epoch and each file.

With several processes (torchrun) only the main one calls them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

Kept = Literal["pack", "checkpoint", "backbone", "state"]


@dataclass
class Control:
    """Shared by the callbacks of a run: whether one of them stops it."""

    stop: bool = False


@dataclass(frozen=True)
class Info:
    """Base of the arguments of callbacks.

    Attributes:
        epoch: from 1.
    """

    epoch: int
    control: Control = field(repr=False, compare=False)

    def stop(self) -> None:
        """Stop the run as early stopping does: the work in progress is finished and saved.

        Called in ``on_step``, it ends the epoch after this step (with several processes, within the next ten). The
        epoch counts as done: it is evaluated, and a resumed run continues with the next one. Elsewhere the run ends
        after the epoch.
        """
        self.control.stop = True


@dataclass(frozen=True)
class EpochStart(Info):
    """Before the first step of an epoch.

    Attributes:
        epochs: of the run.
        steps: of the epoch.
        images: of the epoch, of all processes.
        steps_done: of these steps, by the run that this one goes on with.
        images_done: of these images.
    """

    epochs: int
    steps: int
    images: int
    steps_done: int = 0
    images_done: int = 0


@dataclass(frozen=True)
class StepInfo(Info):
    """After a step of the optimizer.

    Attributes:
        step: of the run, from 1.
        step_in_epoch: from 1.
        images: of the step, of all processes and tasks.
        lr: peak learning rate of the parameter groups without a factor of their own, at this step.
        known_loss: mean loss of the step's images, of all processes, where it is known without waiting for the device:
            at every step on a CPU and where steps take a second or more, else at each tenth and at the last one.
    """

    step: int
    step_in_epoch: int
    images: int
    lr: float
    known_loss: float | None
    scale: float = field(repr=False, compare=False)
    losses: Tensor = field(repr=False, compare=False)

    @property
    def loss(self) -> float:
        """Mean loss of the step's images; where it is not known yet, reading it waits for the device.

        With several processes it is then that of this process's images.
        """
        return float(self.losses.sum() * self.scale) if self.known_loss is None else self.known_loss


@dataclass(frozen=True)
class EpochInfo(Info):
    """After an epoch was evaluated and its files were written. In a run of several tasks there is one for each task.

    Attributes:
        loss: mean of the training images.
        lr: learning rate of the last step.
        metrics: the row of ``metrics.csv``: ``val_loss``, ``val_top1``, ``images_per_second`` and so on.
        best: whether it is the best epoch so far.
        task: name of the task, in a run of several.
        summary: the numbers in words.
    """

    loss: float
    lr: float
    metrics: Mapping[str, float]
    best: bool
    task: str
    summary: str


@dataclass(frozen=True)
class SaveInfo(Info):
    """After a file or folder was written whole.

    Attributes:
        what: ``pack``, ``checkpoint``, ``backbone``, or ``state``: what a resumed run goes on from.
        path: of it.
        best: whether it is of the best epoch so far; else it is of the last one.
        task: name of the task, in a run of several.
    """

    what: Kept
    path: Path
    best: bool
    task: str


class Callback:
    """Called while a run trains. Subclass it and give objects as ``callbacks=`` to `vtk.finetune` and its siblings.

    Every method may be left out; what one returns is ignored. `Info.stop` ends the run. An exception ends it, too, as
    any error does: what was saved is kept. With several processes only the main one calls them, so a callback must not
    start anything that all processes take part in.
    """

    def on_epoch_start(self, info: EpochStart) -> None:
        """Before the first step of an epoch."""

    def on_step(self, info: StepInfo) -> None:
        """After each step of the optimizer."""

    def on_steps_end(self) -> None:
        """After the last step of an epoch, before it is evaluated; also where an error ends the epoch."""

    def on_epoch(self, info: EpochInfo) -> None:
        """After an epoch was evaluated and saved; for each task, in a run of several."""

    def on_save(self, info: SaveInfo) -> None:
        """After a pack, a checkpoint, a backbone or the state of the run was written."""

    def on_end(self) -> None:
        """When the run is over, however it ended."""
