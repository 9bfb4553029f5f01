"""A run that trains the whole model leaves checkpoints: timm's keys and the card, so that no command needs flags."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vtk.card import Card
from vtk.data.loading.train_transform import TrainTransform
from vtk.errors import DataError
from vtk.files import replace_file
from vtk.formats import save_tensors
from vtk.packs.load import card_metadata
from vtk.training.engine.callbacks import Kept
from vtk.training.objectives.binary import set_head_bias
from vtk.training.runs import outputs
from vtk.training.runs.dropout import set_dropout
from vtk.training.runs.one_copy import take_copy
from vtk.training.runs.run import Run
from vtk.training.train_config import TrainConfig


class CheckpointRun(Run):
    """A run that writes ``model.safetensors`` of its best epoch and ``model-last.safetensors`` of its last."""

    what: Kept = "checkpoint"

    @property
    def best_path(self) -> Path:
        """Where the best epoch's checkpoint is."""
        return self.out / outputs.MODEL

    @property
    def last_path(self) -> Path:
        """Where the last epoch's checkpoint is."""
        return self.out / outputs.MODEL_LAST

    def transform(self, **further: Any) -> TrainTransform:
        """Return what training images go through."""
        config = self.config
        assert isinstance(config, TrainConfig)
        return super().transform(remode=config.remode, crop_pad=config.crop_pad, **further)

    def build(self) -> None:
        """Read the data and make the model."""
        super().build()
        config = self.config
        assert isinstance(config, TrainConfig)
        set_dropout(self.model, drop=config.drop, attn_drop=config.attn_drop)
        if config.head_bias is not None and self.new_classifier:
            set_head_bias(self.model, config.head_bias)

    @property
    def started(self) -> bool:
        """Whether the run goes on from trained weights."""
        return self.config.weights is not None or self.config.pretrained

    def keep_best(self, state: Mapping[str, Tensor]) -> None:
        """Write the model after its best epoch so far."""
        self._write(self.best_path, state, self.best_numbers)

    def keep_last(self, state: Mapping[str, Tensor]) -> None:
        """Write the model after its last epoch."""
        if self.best["epoch"] == self.rows[-1]["epoch"]:  # the same tensors and numbers, once more or as a link
            take_copy(self.best_path, self.last_path)
        else:
            self._write(self.last_path, state, self.last_numbers)

    def store_base(self) -> None:
        """Keep no base: a checkpoint is complete."""

    def check_kept(self, *, complete: bool = False) -> None:
        """Make sure, on resume, that the best checkpoint is still there: nothing could write it again."""
        paths = (self.best_path, *((self.last_path,) if complete else ())) if self.best else ()
        for path in (path for path in paths if not path.is_file()):
            which = "the best so far" if path == self.best_path else "of the last epoch"
            raise DataError(
                f"`--resume`: {path}, {which}, is gone; put it back, or give --overwrite in place of --resume"
            )

    def card(self, numbers: Mapping[str, Any]) -> Card:
        """Return the card of a checkpoint, which names a base only where it continued from one."""
        card = super().card(numbers)
        return card if self.started else dataclasses.replace(card, base=None)

    def print_census(self) -> None:
        """Say what is trained: everything."""
        self.census.print("Weights, all of them trained")

    def _write(self, path: Path, state: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        with replace_file(path) as tmp:
            save_tensors(tmp, state, card_metadata(self.card(numbers)))
