"""What a run keeps of its epochs: the numbers of the best one, its pack and adapter, and pictures of it."""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vtk import console
from vtk.card import Card, Regime
from vtk.evaluation import choice
from vtk.evaluation.multilabel import evaluate_labels
from vtk.files import existing_dir
from vtk.models.devices import DTYPES
from vtk.packs.base_files import store_base
from vtk.packs.cards import read_card
from vtk.packs.load import load_task
from vtk.packs.lora_adapter import finish_lora, save_lora
from vtk.packs.pack import PackDtype, save_task, update_card
from vtk.training.engine.callbacks import Kept
from vtk.training.engine.processes import Ranks
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.policies import lora_layers as lora
from vtk.training.runs import outputs
from vtk.training.runs.label_kinds import Scores, recall, remember, separators
from vtk.training.runs.one_copy import keep_one_copy
from vtk.training.runs.scoring import evaluate_ranks
from vtk.training.runs.setup import Setup


class Packs(Setup):
    """Writes the packs of one task's run; `vtk.training.runs.whole_model` writes whole models in their place.

    Attributes:
        what: a run leaves behind, for people.
    """

    what: Kept = "pack"

    @property
    def best_path(self) -> Path:
        """Where the best epoch's pack is."""
        return self.out / outputs.TASK

    @property
    def last_path(self) -> Path:
        """Where the last epoch's pack is."""
        return self.out / outputs.TASK_LAST

    def keep_best(self, state: Mapping[str, Tensor]) -> None:
        """Write what the model is after its best epoch so far."""
        card = self.save_pack(self.best_path, state, self.best_numbers)
        if self.lora is not None:
            save_lora(self.out / outputs.ADAPTER, self.lora, state, card)

    def keep_last(self, state: Mapping[str, Tensor]) -> None:
        """Write what the model is after its last epoch; where packs are rounded, measure what was really stored."""
        self.save_pack(self.last_path, state, self.last_numbers)
        self.finish_adapter()
        if self.pack_dtype != "fp32":
            self.best = self.measure_stored(self.best_path)
            self.measure_stored(self.last_path)
        keep_one_copy(self.best_path, self.last_path)

    def print_census(self) -> None:
        """Say which weights are trained."""
        self.census.print()

    def store_base(self) -> None:
        """Keep the base where later commands find it: packs need it."""
        store_base(self.created.base)

    def check_kept(self, *, complete: bool = False) -> None:
        """Make sure, on resume, that what the run left as its best is still there, and of a complete run all of it."""
        if self.best:  # within the first epoch there is none
            outputs.check_best(self.out, self.config.train, complete=complete)

    def judge(self, epoch: int, metrics: Scores) -> bool:
        """Remember ``metrics`` if they are the best so far, and return whether they are."""
        metric = self.config.chosen_metric
        better = not self.best or choice.rank(metric, metrics.numbers()) > choice.rank(metric, self.best)
        if better:
            self.best = remember(epoch, metrics)
        return better

    @property
    def pack_dtype(self) -> PackDtype:
        """How packs are stored."""
        return self.config.pack_dtype if isinstance(self.config, FinetuneConfig) else "fp32"

    @property
    def fruitless(self) -> int:
        """Epochs since the best one."""
        return int(self.rows[-1]["epoch"]) - int(self.best["epoch"]) if self.rows and self.best else 0

    def enough(self) -> bool:
        """Whether ``--patience`` is at its end."""
        patience = self.config.patience
        return patience is not None and self.fruitless >= patience

    def evaluate(self, *, show_progress: bool) -> Scores:
        """Score the model as its pack will compute."""
        with self._as_packed():
            return self._score(self.model, self.ranks, show_progress)

    def _score(self, model: nn.Module, ranks: Ranks, show_progress: bool) -> Scores:
        kind = {"score": evaluate_labels} if self.config.multi_label else {}
        return evaluate_ranks(model, self.val_loader, self.audit.classes, ranks, show_progress=show_progress, **kind)

    def _as_packed(self) -> contextlib.AbstractContextManager[None]:
        """Let the model compute, inside of the context, what its pack will."""
        if self.lora is None:
            return contextlib.nullcontext()
        return lora.merged_into(self.model, self.lora, self.precision.master_state_dict(self.model))

    def save_pack(self, path: Path, state: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> Card:
        """Write a pack of ``state`` whose card tells ``numbers``."""
        trained = self.trained
        if self.lora is not None:
            state, trained = self.lora.merge(state), frozenset(map(self.lora.plain_name, trained))
        card = self.card(numbers)
        return save_task(path, state=state, created=self.created, card=card, trained=trained, dtype=self.pack_dtype)

    def card(self, numbers: Mapping[str, Any]) -> Card:
        """Return the card of what the run leaves behind, with these metrics."""
        config, created = self.config, self.created
        return Card(
            model=created.spec,
            input=created.input,
            classes=self.audit.classes,
            base=created.base.ref,
            transforms=created.transforms,
            metrics=dict(numbers),
            data={
                "layout": self.audit.layout,
                "val_split": config.val_split,
                "seed": config.seed,
                "root": self.audit.root.resolve().name,
                "max_pixels": config.max_pixels,
                **separators(config),
                "images": self.images.to_dict(),
                **config.trial,
            },
            regime=Regime(self.precision.name, config.eval_batch_size, self.ranks.device.type),
            versions=outputs.versions(),
            command=self.command,
            multi_label=config.multi_label,
        )

    @property
    def best_numbers(self) -> dict[str, Any]:
        """What a card tells of the best epoch."""
        return {key: value for key, value in self.best.items() if key != "confusion"}

    @property
    def last_numbers(self) -> dict[str, Any]:
        """What a card tells of the last epoch; rows of an older version lack the newer numbers."""
        row = self.rows[-1]
        found = {key: row.get(f"val_{key}") for key in self.best_numbers}
        found |= {"count": self.best["count"], "epoch": int(row["epoch"])}
        return {key: value for key, value in found.items() if value is not None}

    def finish_adapter(self) -> None:
        """Make the adapter of the best epoch complete, and check what PEFT makes of it."""
        if self.lora is None:
            return
        path = self.out / outputs.ADAPTER
        start = self.lora.start(self.precision.master_state_dict(self.model))
        shared = lora.shared_names(self.created, start)
        worst = finish_lora(path, self.lora, start, shared, read_card(self.out / outputs.TASK))
        console.say(f"{self.title}adapter {path}: PEFT's logits differ from the merged ones by at most {worst:.0e}")

    def draw(self) -> None:
        """Write the plots and the table of classes."""
        outputs.write_plots(self.out, self.rows, self.best_metrics())

    def measure_stored(self, path: Path) -> dict[str, Any]:
        """Evaluate a pack from its file, so that its card tells what others will measure."""
        model = load_task(path).model.to(self.ranks.device)
        model.to(DTYPES[self.precision.name])
        metrics = self._score(model, Ranks(self.ranks.device), show_progress=False)
        card = read_card(path)
        found = remember(int(card.metrics["epoch"]), metrics)
        numbers = {key: value for key, value in found.items() if key != "confusion"}
        update_card(existing_dir(path), dataclasses.replace(card, metrics=numbers))
        return found

    def best_metrics(self) -> Scores:
        """Return the numbers of the best epoch."""
        return recall(self.best, self.audit.classes, self.config.multi_label)
