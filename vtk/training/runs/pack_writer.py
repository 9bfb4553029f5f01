"""Writes the packs of a fine-tuned task and, of LoRA, its adapter."""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from vtk import console
from vtk.card import Card
from vtk.files import existing_dir
from vtk.models.devices import DTYPES
from vtk.packs.base_files import store_base
from vtk.packs.cards import is_pack, read_card
from vtk.packs.load import load_task
from vtk.packs.lora_adapter import finish_lora, save_lora
from vtk.packs.lora_factors import run_factors
from vtk.packs.pack import save_task, update_card
from vtk.training.engine.callbacks import Kept
from vtk.training.engine.processes import Ranks
from vtk.training.policies import lora_layers as lora
from vtk.training.runs import outputs
from vtk.training.runs.held_out_answers import HeldOutAnswers
from vtk.training.runs.label_kinds import remember
from vtk.training.runs.small_pack import write_small
from vtk.training.runs.writer import Writer, link_equal_files


class PackWriter(Writer):
    """Writes ``task`` after the best epoch, ``task-last`` and ``task-small`` at the end, and ``adapter`` of LoRA."""

    what: ClassVar[Kept] = "pack"

    @property
    def best_path(self) -> Path:
        """Where the pack of the best epoch is."""
        return self.plan.out / outputs.TASK

    @property
    def last_path(self) -> Path:
        """Where the pack of the last epoch is."""
        return self.plan.out / outputs.TASK_LAST

    @property
    def adapter(self) -> Path | None:
        """Folder of the LoRA adapter; None without one."""
        return self.plan.out / outputs.ADAPTER if self.task.lora is not None else None

    def store_base(self) -> None:
        """Store the base weights, which packs need, where later commands look for them."""
        store_base(self.task.created.base)

    def write_best(self, state: Mapping[str, Tensor]) -> None:
        """Write the pack of the best epoch so far, and its adapter."""
        card = self._write(self.best_path, state, self.history.best_numbers)
        if self.task.lora is not None:
            save_lora(self.plan.out / outputs.ADAPTER, self.task.lora, state, card)

    def write_last(self, state: Mapping[str, Tensor]) -> None:
        """Write the pack of the last epoch; where packs are rounded, both are evaluated from their files."""
        self._write(self.last_path, state, self.history.last_numbers)
        self.complete_best()
        if self.prepared.config.pack_dtype != "fp32":
            self.history.best = self._measure(self.best_path)
            self._measure(self.last_path)
        link_equal_files(self.best_path, self.last_path)
        self.write_missing()

    def write_missing(self) -> None:
        """Write the compressed copy of the best pack, where ``--pack-rank`` asks for one that is not there."""
        small = self.plan.out / outputs.TASK_SMALL
        if self.prepared.config.pack_rank is not None and not is_pack(small):
            write_small(self.prepared, self.best_path, small)

    def check_files(self, *, complete: bool) -> None:
        """Make sure, on resume, that the pack of the best epoch and of LoRA its adapter are still there."""
        if self.history.best:  # within the first epoch there is none
            outputs.check_best(self.plan.out, self.prepared.config.train, complete=complete)

    def print_census(self) -> None:
        """Print the numbers of trained and frozen weights; warn of LoRA layers that tasks could not share."""
        self.task.census.print()
        if self.task.lora is not None:
            lora.warn_of_shared(self.task.model, self.task.lora)

    def complete_best(self) -> None:
        """Complete the adapter of the best epoch, and compare PEFT's logits with those of the pack."""
        if self.task.lora is None:
            return
        path = self.plan.out / outputs.ADAPTER
        start = self.task.lora.start(self.plan.precision.master_state_dict(self.task.model))
        shared = lora.shared_names(self.task.created, start)
        worst = finish_lora(path, self.task.lora, start, shared, read_card(self.best_path))
        console.say(f"{self.plan.title}adapter {path}: PEFT's logits {console.deviation('the merged ones', worst)}")

    def as_stored(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the LoRA layers are merged, as they are in the pack."""
        if self.task.lora is None:
            return contextlib.nullcontext()
        state = self.plan.precision.master_state_dict(self.task.model)
        return lora.merged_into(self.task.model, self.task.lora, state)

    def _write(self, path: Path, state: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> Card:
        created, trained, layers, factors = self.task.created, self.task.trained, self.task.lora, {}
        if layers is not None:
            factors = run_factors(created, layers, state)
            state, trained = layers.merge(state), frozenset(map(layers.plain_name, trained))
        dtype = self.prepared.config.pack_dtype
        card = self.card(numbers)
        return save_task(path, state=state, created=created, card=card, trained=trained, dtype=dtype, factors=factors)

    def _measure(self, path: Path) -> dict[str, Any]:
        """Evaluate a pack from its file and correct its card: rounded weights have other metrics than the model."""
        ranks = Ranks(self.plan.ranks.device)
        model = load_task(path).model.to(ranks.device)
        model.to(DTYPES[self.plan.precision.name])
        answers = HeldOutAnswers(self.task, self.prepared.config.seed)
        metrics = self.prepared.score(model, ranks, show_progress=False, keep=answers.keep)
        card = read_card(path)
        values = remember(int(card.metrics["epoch"]), metrics)
        numbers = {key: value for key, value in values.items() if key != "confusion"}
        update_card(existing_dir(path), dataclasses.replace(card, metrics=numbers, calibration=answers.calibrate()))
        return values
