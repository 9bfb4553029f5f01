"""Trains all weights of a timm model on a folder of images, and writes checkpoints that every command takes."""

from collections.abc import Sequence

from vtk.errors import UsageError
from vtk.options import expect
from vtk.training.engine.callbacks import Callback
from vtk.training.engine.result import TrainResult
from vtk.training.memory import MemoryChoice
from vtk.training.runs.checkpoint_writer import CheckpointWriter
from vtk.training.runs.prepare import report_memory
from vtk.training.runs.run import open_run
from vtk.training.train_config import TrainConfig


def train(config: TrainConfig, *, callbacks: Sequence[Callback] = ()) -> TrainResult:
    """Train all weights of a timm model on a folder of images, and write checkpoints, metrics and plots to ``out``.

    Args:
        config: of the run.
        callbacks: called after every step, epoch and file (`vtk.Callback`).

    Raises:
        UsageError, DataError, UnavailableError: as of `vtk.finetune`.
        DivergedError: the loss became infinite or not a number; the best checkpoint so far is kept.
    """
    expect(config, TrainConfig, "train")
    if config.dry_run:
        raise UsageError("`--dry-run` trains nothing; call vtk.training.preview or train_memory for its numbers")
    with open_run(config, CheckpointWriter, callbacks=callbacks) as run:
        result = run.go()
    return TrainResult(result.out, result.task, result.task_last, result)


def train_memory(config: TrainConfig) -> MemoryChoice:
    """Return the memory that a step of ``config`` would take; nothing is trained and nothing written.

    Raises:
        UsageError: flags that are wrong or contradict each other.
        DataError: the folder or the weights cannot be used.
        UnavailableError: the device is not available.
    """
    return report_memory(config)
