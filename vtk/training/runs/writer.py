"""The interface of the writers of a run's weights, and the card they share."""

import contextlib
import filecmp
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from vtk.calibration import Calibration
from vtk.card import Card, Regime
from vtk.files import replace_file
from vtk.packs.cards import read_card
from vtk.training.engine.callbacks import Kept
from vtk.training.runs.command_line import versions
from vtk.training.runs.held_out_answers import HeldOutAnswers
from vtk.training.runs.history import History
from vtk.training.runs.label_kinds import separators
from vtk.training.runs.prepare import PreparedTask


class Writer(ABC):
    """Writes the trained weights of one task after its best and its last epoch.

    Args:
        prepared: the task.
        history: numbers of its epochs.

    Attributes:
        what: kind of file or folder, for people and callbacks.
        answers: of the latest evaluation; None before the first of this process.
    """

    what: ClassVar[Kept]

    def __init__(self, prepared: PreparedTask, history: History) -> None:
        self.prepared, self.history = prepared, history
        self.task, self.plan = prepared.task, prepared.task.plan
        self.answers: HeldOutAnswers | None = None

    @property
    @abstractmethod
    def best_path(self) -> Path:
        """Where the weights of the best epoch are."""

    @property
    @abstractmethod
    def last_path(self) -> Path:
        """Where the weights of the last epoch are."""

    @property
    def adapter(self) -> Path | None:
        """Folder of the LoRA adapter; None without one."""
        return None

    @abstractmethod
    def write_best(self, state: Mapping[str, Tensor]) -> None:
        """Write the weights after the best epoch so far.

        Args:
            state: state dict of the model, trained tensors in fp32.
        """

    @abstractmethod
    def write_last(self, state: Mapping[str, Tensor]) -> None:
        """Write the weights after the last epoch; ``state`` as of `write_best`."""

    @abstractmethod
    def check_files(self, *, complete: bool) -> None:
        """Make sure, on resume, that the files of the best epoch are still there: nothing could write them again.

        Args:
            complete: whether the run is, so that those of the last epoch must be there, too.

        Raises:
            DataError: a file is gone.
        """

    @abstractmethod
    def print_census(self) -> None:
        """Print the numbers of trained and frozen weights."""

    @abstractmethod
    def store_base(self) -> None:
        """Store the base weights, where the files need them; called before the first epoch."""

    @abstractmethod
    def complete_best(self) -> None:
        """Complete the files of the best epoch, at the end of the run or where it diverged."""

    def write_missing(self) -> None:
        """Write what a complete run lacks and its options now ask for; here nothing."""
        return

    def as_stored(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model computes what the written weights will compute."""
        return contextlib.nullcontext()

    def card(self, numbers: Mapping[str, Any]) -> Card:
        """Return the card of the written weights, with these metrics."""
        task, created, config = self.task, self.task.created, self.prepared.config
        return Card(
            model=created.spec,
            input=created.input,
            classes=task.audit.classes,
            base=created.base.ref,
            transforms=created.transforms,
            metrics=dict(numbers),
            data={
                "layout": task.audit.layout,
                "val_split": config.val_split,
                "seed": config.seed,
                "init": created.init,
                "root": task.audit.root.resolve().name,
                "max_pixels": config.max_pixels,
                **separators(config),
                "images": task.images.to_dict(),
                **config.share,
                **config.trial,
            },
            regime=Regime(self.plan.precision.name, config.eval_batch_size, self.plan.ranks.device.type),
            versions=versions(),
            command=self.plan.command,
            multi_label=config.multi_label,
            calibration=self._calibration(),
        )

    def _calibration(self) -> Calibration | None:
        if self.answers is not None:
            return self.answers.calibrate()
        # resumed after the last epoch: nothing was evaluated since
        best, rows = self.history.best, self.history.rows
        same = best and rows and best["epoch"] == rows[-1]["epoch"]
        return read_card(self.best_path).calibration if same else None


def link_equal_files(kept: Path, other: Path) -> None:
    """Let the files of the folder ``other`` that equal those of ``kept``, of the same names, be the same files.

    The packs of the best and of the last epoch are often the same. A file gets a second name (a hard link): our own
    writers replace files and change none in place, so neither name changes with the other. Where a disk has no hard
    links there are two copies.
    """
    for two in sorted(other.iterdir()):
        one = kept / two.name
        if one.is_file() and two.is_file() and not one.samefile(two) and filecmp.cmp(one, two, shallow=False):
            link_file(one, two)


def link_file(one: Path, two: Path) -> None:
    """Replace the file ``two`` by ``one``, under both names.

    Raises:
        DataError: the folder cannot be written or the disk is full.
    """
    with replace_file(two) as tmp:
        tmp.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.link(one, tmp)
            return
        shutil.copyfile(one, tmp)
