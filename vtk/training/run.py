"""One task's run: training, and what is kept of it: packs, metrics, plots, and the state to resume from."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vtk import console
from vtk.card import Card, Regime
from vtk.evaluation.metrics import Metrics
from vtk.files import existing_dir, write_json, write_text
from vtk.tasks.base import store_base
from vtk.tasks.load import load_task, read_card
from vtk.tasks.lora import finish_lora, save_lora
from vtk.tasks.pack import save_task, update_card
from vtk.training import checkpoint, lora, outputs
from vtk.training.engine import DivergedError, fit
from vtk.training.parallel import Ranks
from vtk.training.precision import DTYPES
from vtk.training.result import EpochEnd, FinetuneResult, FitResult
from vtk.training.scoring import default_workers, evaluate_ranks
from vtk.training.setup import Setup


class Run(Setup):
    """One task's run, alone or as a part of a `vtk.training.joint.JointRun`."""

    def go(self) -> FinetuneResult:
        """Run the task alone."""
        out, ranks = self.out, self.ranks
        saved = self.load()
        if ranks.main:
            outputs.check_run(out, overwrite=self.config.overwrite, resume=self.config.resume)
        with outputs.no_empty_folder(out):
            self.build()
            self.settle(saved)
        self.identity = self.make_identity()
        if saved is not None:
            checkpoint.check_identity(saved.identity, self.identity)
            checkpoint.restore(self.model, saved.tensors, self.trained)
            self.best, self.rows = saved.best, list(saved.fit.rows)
            outputs.check_best(out, self.config.train)
        if ranks.main:
            self.start()
        ranks.wait()
        result = self._fit(saved)
        if ranks.main:
            self.finish()
        ranks.wait()
        return self.result(result.images_per_second)

    def result(self, images_per_second: float) -> FinetuneResult:
        """Return what the run left behind."""
        out = self.out
        return FinetuneResult(
            out, out / outputs.TASK, out / outputs.TASK_LAST, self._best_metrics(), self.best["epoch"], self.rows,
            self.census, images_per_second, self.precision.name, self.memory.mode, self.memory.batch,
            out / outputs.ADAPTER if self.lora is not None else None,
        )  # fmt: skip

    def start(self) -> None:
        """Say what will be done, and keep what later commands need."""
        self.audit.print()
        for note in self.created.notes:
            console.say(note)
        self.census.print()
        if self.lora is not None:
            lora.warn_of_shared(self.model, self.lora)
        if not self.title:  # of several tasks it is one line for all
            console.say(self.memory.line)
        out = self.out
        outputs.sweep(out)
        store_base(self.created.base)
        if self.config.overwrite:  # not before: with wrong data or weights the earlier run stays
            outputs.clear_run(out)
        write_text(out / "config.yaml", outputs.config_text(self.config))
        write_json(out / "audit.json", self.audit.to_dict())
        write_json(out / "census.json", self.census.to_dict())

    def _fit(self, saved: checkpoint.Saved | None) -> FitResult:
        workers = default_workers(self.config.workers, self.ranks.world)
        stream, objective = self.feed(workers)
        try:
            return fit(
                self.model, objective, [stream], self.config, self.precision, ranks=self.ranks,
                start=saved.fit if saved else None, on_epoch=self._epoch,
            )  # fmt: skip
        except DivergedError as error:
            if not self.best:
                raise
            if self.ranks.main:
                self._finish_adapter()
                self.draw()
            kept = self.out / outputs.TASK
            raise DivergedError(f"{error}; the best pack, of epoch {self.best['epoch']}, is kept in {kept}") from error

    def _epoch(self, end: EpochEnd) -> Mapping[str, float]:
        """Score the epoch, and write what a resume needs."""
        numbers = self.score(end.row)
        if self.ranks.main:
            saved = checkpoint.Saved(self.live_state(), end.state(numbers), self.best, self.identity)
            checkpoint.save_state(self.out / outputs.LAST, saved)
        return numbers

    def live_state(self) -> dict[str, Tensor]:
        """Return what training changes, on the CPU: masters, and buffers as they are; of a CPU model no copies."""
        state = self.model.state_dict()
        return {name: state[name].detach().cpu() for name in self.trained}

    def score(self, row: Mapping[str, float]) -> Mapping[str, float]:
        """Evaluate after an epoch whose numbers are ``row``, and keep the pack if it is the best so far."""
        epoch = int(row["epoch"])
        with self._as_packed():
            metrics = evaluate_ranks(
                self.model, self.val_loader, self.audit.classes, self.ranks, show_progress=self.ranks.main
            )
        if not math.isfinite(metrics.loss):
            raise DivergedError(
                f"the held-out loss is {metrics.loss} after epoch {epoch}; use a lower --lr or a longer --warmup"
            )
        numbers = {"val_loss": metrics.loss, "val_top1": metrics.top1, "val_top5": metrics.top5}
        rank = (metrics.top1, -metrics.loss)
        better = not self.best or rank > (self.best["top1"], -self.best["loss"])
        if better:
            self.best = _remember(epoch, metrics)
        self.rows.append({**row, **numbers})
        if self.ranks.main:
            if better:
                state = self.precision.master_state_dict(self.model)
                card = self._save_pack(self.out / outputs.TASK, state, epoch, metrics)
                if self.lora is not None:
                    save_lora(self.out / outputs.ADAPTER, self.lora, state, card)
            outputs.write_rows(self.out, self.rows)
            console.say(
                f"{self.title}epoch {epoch}/{self.config.epochs}: loss {row['loss']:.3f}, held-out top-1 "
                f"{console.percent(metrics.top1)}, loss {metrics.loss:.3f}, "
                f"{row['images_per_second']:,.0f} images/s{', best so far' if better else ''}"
            )
        return numbers

    def _as_packed(self) -> contextlib.AbstractContextManager[None]:
        """Let the model compute, inside of the context, what its pack will."""
        if self.lora is None:
            return contextlib.nullcontext()
        return lora.merged_into(self.model, self.lora, self.precision.master_state_dict(self.model))

    def _save_pack(self, path: Path, state: Mapping[str, Tensor], epoch: int, metrics: Metrics) -> Card:
        config, created, trained = self.config, self.created, self.trained
        if self.lora is not None:
            state, trained = self.lora.merge(state), frozenset(map(self.lora.plain_name, trained))
        card = Card(
            model=created.spec,
            input=created.input,
            classes=self.audit.classes,
            base=created.base.ref,
            transforms=created.transforms,
            metrics=_numbers(metrics, epoch),
            data={
                "layout": self.audit.layout,
                "val_split": config.val_split,
                "seed": config.seed,
                "root": self.audit.root.resolve().name,
            },
            regime=Regime(self.precision.name, config.eval_batch_size, self.ranks.device.type),
            versions=outputs.versions(),
            command=self.command,
        )
        return save_task(path, state=state, created=created, card=card, trained=trained, dtype=config.pack_dtype)

    def finish(self) -> None:
        """Write the last pack and the plots; where packs are rounded, measure what was really stored."""
        out, config = self.out, self.config
        state = self.precision.master_state_dict(self.model)
        row = self.rows[-1]
        last = dataclasses.replace(
            self._best_metrics(), top1=row["val_top1"], top5=row["val_top5"], loss=row["val_loss"]
        )
        self._save_pack(out / outputs.TASK_LAST, state, int(row["epoch"]), last)
        self._finish_adapter()
        if config.pack_dtype != "fp32":
            self.best = self._measure_stored(out / outputs.TASK)
            self._measure_stored(out / outputs.TASK_LAST)
        self.draw()
        metrics = self._best_metrics()
        console.say(
            f"{self.title}best epoch {self.best['epoch']}: held-out top-1 {console.percent(metrics.top1)}, top-5 "
            f"{console.percent(metrics.top5)} of {metrics.count} images; pack {out / outputs.TASK}"
        )
        if len(self.rows) < config.epochs:
            console.say(f"stopped after {len(self.rows)} of {config.epochs} epochs; go on with --resume")

    def _finish_adapter(self) -> None:
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
        outputs.write_best(self.out, self._best_metrics())
        outputs.write_curves(self.out, self.rows)

    def _measure_stored(self, path: Path) -> dict[str, Any]:
        """Evaluate a pack from its file, so that its card tells what others will measure."""
        model = load_task(path).model.to(self.ranks.device)
        model.to(DTYPES[self.precision.name])
        alone = Ranks(self.ranks.device)
        metrics = evaluate_ranks(model, self.val_loader, self.audit.classes, alone, show_progress=False)
        card = read_card(path)
        epoch = int(card.metrics["epoch"])
        update_card(existing_dir(path), dataclasses.replace(card, metrics=_numbers(metrics, epoch)))
        return _remember(epoch, metrics)

    def _best_metrics(self) -> Metrics:
        best = self.best
        return Metrics(
            count=best["count"],
            top1=best["top1"],
            top5=best["top5"],
            loss=best["loss"],
            confusion=best["confusion"].numpy(),
            classes=self.audit.classes,
        )


def _numbers(metrics: Metrics, epoch: int) -> dict[str, Any]:
    return {
        "top1": metrics.top1, "top5": metrics.top5, "loss": metrics.loss, "count": metrics.count, "epoch": epoch,
    }  # fmt: skip


def _remember(epoch: int, metrics: Metrics) -> dict[str, Any]:
    return {**_numbers(metrics, epoch), "confusion": torch.as_tensor(metrics.confusion)}
