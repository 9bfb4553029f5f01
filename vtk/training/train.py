"""``train``: from a folder of images to a model of one's own, as a checkpoint that every other command takes."""

from collections.abc import Sequence
from pathlib import Path

from vtk.errors import UsageError
from vtk.options import expect
from vtk.training.engine.callbacks import Callback
from vtk.training.engine.processes import open_ranks
from vtk.training.engine.result import TrainResult
from vtk.training.finetune import report_memory, run_callbacks
from vtk.training.memory import MemoryChoice
from vtk.training.runs.whole_model import CheckpointRun
from vtk.training.train_config import TrainConfig


def train(config: TrainConfig, *, callbacks: Sequence[Callback] = ()) -> TrainResult:
    """Train all weights of a timm model on a folder of images, and write checkpoints, metrics and plots to ``out``.

    Args:
        config: of the run.
        callbacks: told of every step, epoch and file (`vtk.Callback`).

    Raises:
        UsageError: flags that are wrong, contradict each other or, on resume, differ from the run's.
        DataError: the folder, the weights or the output folder cannot be used.
        UnavailableError: the device is not here.
        DivergedError: the loss became infinite or not a number; the best checkpoint so far is kept.
    """
    expect(config, TrainConfig, "train")
    if config.dry_run:
        raise UsageError("`--dry-run` trains nothing; call vtk.training.preview or train_memory for its numbers")
    run = open_checkpoint_run(config)
    run.callbacks = run_callbacks(callbacks, run.ranks)
    found = run.go()
    return TrainResult(found.out, found.task, found.task_last, found)


def train_memory(config: TrainConfig) -> MemoryChoice:
    """Return the memory that a step of ``config`` would take; nothing is trained and nothing written.

    Raises:
        UsageError: flags that are wrong or contradict each other.
        DataError: the folder or the weights cannot be used.
        UnavailableError: the device is not here.
    """
    return report_memory(open_checkpoint_run(config))


def open_checkpoint_run(config: TrainConfig) -> CheckpointRun:
    """Return a run that has not begun."""
    if config.data is None:
        raise UsageError("no data: give a folder with train/ and val/, or with one folder per class")
    return CheckpointRun(config, config.out or Path("runs") / config.data.resolve().name, open_ranks(config.device))
