"""Writes the checkpoints of a run that trains the whole model: timm's keys and a card, which commands read."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from vtk.card import Card
from vtk.errors import DataError
from vtk.files import replace_file
from vtk.formats import save_tensors
from vtk.packs.load import card_metadata
from vtk.training.engine.callbacks import Kept
from vtk.training.runs import outputs
from vtk.training.runs.writer import Writer, link_file


class CheckpointWriter(Writer):
    """Writes ``model.safetensors`` after the best epoch and ``model-last.safetensors`` after the last one."""

    what: ClassVar[Kept] = "checkpoint"

    @property
    def best_path(self) -> Path:
        """Where the checkpoint of the best epoch is."""
        return self.plan.out / outputs.MODEL

    @property
    def last_path(self) -> Path:
        """Where the checkpoint of the last epoch is."""
        return self.plan.out / outputs.MODEL_LAST

    def write_best(self, state: Mapping[str, Tensor]) -> None:
        """Write the checkpoint of the best epoch so far."""
        self._write(self.best_path, state, self.history.best_numbers)

    def write_last(self, state: Mapping[str, Tensor]) -> None:
        """Write the checkpoint of the last epoch."""
        if self.history.best["epoch"] == self.history.rows[-1]["epoch"]:  # the same tensors and numbers
            link_file(self.best_path, self.last_path)
        else:
            self._write(self.last_path, state, self.history.last_numbers)

    def check_files(self, *, complete: bool) -> None:
        """Make sure, on resume, that the checkpoint of the best epoch is still there."""
        paths = (self.best_path, *((self.last_path,) if complete else ())) if self.history.best else ()
        for path in (path for path in paths if not path.is_file()):
            which = "the best so far" if path == self.best_path else "of the last epoch"
            raise DataError(
                f"`--resume`: {path}, {which}, is gone; put it back, or give --overwrite in place of --resume"
            )

    def print_census(self) -> None:
        """Print the numbers of weights, all of which are trained."""
        self.task.census.print("Weights, all of them trained")

    def store_base(self) -> None:
        """Store nothing: a checkpoint is complete."""

    def complete_best(self) -> None:
        """Do nothing: a checkpoint is complete."""

    def card(self, numbers: Mapping[str, Any]) -> Card:
        """Return the card of a checkpoint, which names a base only where training started from one."""
        card, config = super().card(numbers), self.prepared.config
        return card if config.weights is not None or config.pretrained else dataclasses.replace(card, base=None)

    def _write(self, path: Path, state: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        with replace_file(path) as tmp:
            save_tensors(tmp, state, card_metadata(self.card(numbers)))
