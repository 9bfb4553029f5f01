"""``finetune``: from a folder of images and a base to a task pack."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vtk import console
from vtk.card import Card, Regime
from vtk.data.audit import DataAudit, scan
from vtk.data.loader import make_loader
from vtk.data.transforms import eval_transform, train_transform
from vtk.errors import DataError, UsageError
from vtk.evaluation.metrics import Metrics
from vtk.files import existing_dir, write_json, write_text
from vtk.models.arguments import parse_model_kwargs
from vtk.models.create import check_transforms, create_model
from vtk.models.inputs import input_spec
from vtk.tasks.base import store_base
from vtk.tasks.load import load_task, read_card
from vtk.tasks.pack import save_task, update_card
from vtk.training import checkpoint, outputs, policy
from vtk.training.census import Census, take_census
from vtk.training.config import FinetuneConfig
from vtk.training.engine import DivergedError, fit
from vtk.training.memory import MemoryChoice, choose_memory
from vtk.training.objective import Classification
from vtk.training.parallel import Ranks, open_ranks
from vtk.training.precision import make_precision
from vtk.training.result import EpochEnd, FitResult
from vtk.training.scoring import default_workers, evaluate_ranks
from vtk.training.streams import ImageStream


@dataclass(frozen=True)
class FinetuneResult:
    """What a run left behind.

    Attributes:
        out: folder of the run.
        task: the best pack.
        task_last: the pack of the last epoch.
        metrics: of the best pack on the held-out images.
        best_epoch: from 1.
        rows: numbers of every epoch.
        census: trained and frozen weights.
        images_per_second: of training, without evaluation; NaN when nothing was left to train.
        precision: ``fp32`` or ``bf16``.
        memory: the memory mode that was taken.
        batch_size: images per forward pass.
    """

    out: Path
    task: Path
    task_last: Path
    metrics: Metrics
    best_epoch: int
    rows: list[dict[str, float]]
    census: Census
    images_per_second: float
    precision: str
    memory: str
    batch_size: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "out": str(self.out),
            "task": str(self.task),
            "task_last": str(self.task_last),
            "top1": self.metrics.top1,
            "top5": self.metrics.top5,
            "loss": self.metrics.loss,
            "best_epoch": self.best_epoch,
            "epochs": len(self.rows),
            "trained": self.census.trained,
            "total": self.census.total,
            "images_per_second": self.images_per_second,
            "precision": self.precision,
            "memory": self.memory,
            "batch_size": self.batch_size,
        }


def finetune(config: FinetuneConfig) -> FinetuneResult:
    """Fine-tune a timm model on a folder of images and write its packs, metrics and plots to ``config.out``.

    Raises:
        UsageError: flags that are wrong, contradict each other or, on resume, differ from the run's.
        DataError: the folder, the weights or the output folder cannot be used.
        UnavailableError: the device is not here.
        DivergedError: the loss became infinite or not a number; the best pack so far is kept.
    """
    if config.dry_run:
        raise UsageError("`--dry-run` trains nothing; call vtk.training.memory_report for its numbers")
    return _open_run(config).go()


def memory_report(config: FinetuneConfig) -> MemoryChoice:
    """Return the memory that a run of ``config`` would take in each mode; nothing is trained and nothing written.

    Raises:
        UsageError: flags that are wrong or contradict each other.
        DataError: the folder or the weights cannot be used.
        UnavailableError: the device is not here.
    """
    run = _open_run(config)
    run.build(run.load())
    return run.memory


def _open_run(config: FinetuneConfig) -> "_Run":
    if config.data is None:
        raise UsageError("no data: give a folder with train/ and val/, or with one folder per class")
    ranks = open_ranks(config.device)
    return _Run(config, config.out or Path("runs") / config.data.resolve().name, ranks)


class _Run:
    """One run of `finetune`: what its steps share."""

    def __init__(self, config: FinetuneConfig, out: Path, ranks: Ranks) -> None:
        self.config, self.out, self.ranks = config, out, ranks
        self.best: dict[str, Any] = {}
        self.identity: dict[str, Any] = {}
        self.rows: list[dict[str, float]] = []

    def go(self) -> FinetuneResult:
        out, ranks = self.out, self.ranks
        saved = self.load()
        if ranks.main:
            outputs.check_run(out, overwrite=self.config.overwrite, resume=self.config.resume)
        self.build(saved)
        self.identity = checkpoint.identity(
            self.config, base_id=self.created.base.ref.id, samples=self.audit.train, root=self.audit.root,
            precision=self.precision.name, world=ranks.world,
        )  # fmt: skip
        if saved is not None:
            checkpoint.check_identity(saved.identity, self.identity)
            checkpoint.restore(self.model, saved.tensors)
            self.best, self.rows = saved.best, list(saved.fit.rows)
        if ranks.main:
            self._start()
        ranks.wait()
        result = self._fit(saved)
        if ranks.main:
            self._finish(result)
        ranks.wait()
        return FinetuneResult(
            out, out / outputs.TASK, out / outputs.TASK_LAST, self._best_metrics(), self.best["epoch"], result.rows,
            self.census, result.images_per_second, self.precision.name, self.memory.mode, self.memory.batch,
        )  # fmt: skip

    def load(self) -> checkpoint.Saved | None:
        """Check what can be checked before an image is read, and return the state of the run that is resumed."""
        config = self.config
        self.kwargs = parse_model_kwargs(config.model_kwargs)
        # a size that cannot be is refused before any image is read
        self.spec = input_spec(
            config.model, self.kwargs, config.img_size, mean=config.mean, std=config.std,
            interpolation=config.interpolation, crop_pct=config.crop_pct, resize_mode=config.resize_mode,
        )  # fmt: skip
        check_transforms(config.model, config.transforms(), self.kwargs)
        low, high = config.crop_scale
        self.augment = train_transform(
            self.spec, crop_scale=(low, high), hflip=config.hflip, auto_augment=config.auto_augment,
            color_jitter=config.color_jitter, reprob=config.reprob,
        )  # fmt: skip
        return checkpoint.load_state(self.out / outputs.LAST) if config.resume else None

    def build(self, saved: checkpoint.Saved | None) -> None:
        """Read the data, make the model, and settle what is trained, in which numbers and memory mode."""
        config, ranks = self.config, self.ranks
        self.audit = self._scan()
        self.created = create_model(
            config.model, num_classes=len(self.audit.classes), img_size=config.img_size, weights=config.weights,
            pretrained=config.pretrained, seed=config.seed, drop_path_rate=config.drop_path, kwargs=self.kwargs,
            input=self.spec, transforms=config.transforms(),
        )  # fmt: skip
        self.model = self.created.model
        made: frozenset[str] = frozenset()
        if self.created.transforms:  # without one, a tensor that the base lacks is the model's own
            made = policy.created_names(self.created.key_map, self.model)
        trained = policy.select(self.model, config.train, made)
        policy.apply(self.model, trained)
        self.trained = trained | (policy.live_buffers(self.model) & self.model.state_dict().keys())
        self.census = take_census(self.model, trained, config.train)
        self.precision = make_precision(config.precision, ranks.device)
        image = self.created.input
        self.memory = choose_memory(
            self.model, config, self.precision.name, ranks, size=(image.in_chans, image.height, image.width),
            images=len(self.audit.train), saved=saved.identity["flags"] if saved else None, count_all=config.dry_run,
        )  # fmt: skip
        self.config = dataclasses.replace(config, memory=self.memory.mode, batch_size=self.memory.batch)

    def _scan(self) -> DataAudit:
        config, ranks = self.config, self.ranks
        assert config.data is not None
        workers = config.workers
        for turn in (True, False):  # the main process scans first; the others find its cache
            if ranks.main == turn:
                audit = scan(
                    config.data, val_split=config.val_split, seed=config.seed, workers=workers, show_progress=ranks.main
                )
            ranks.wait()
        if not audit.val:
            raise DataError(
                f"{config.data} has no held-out images to choose the best epoch by; give it a val/ folder, or "
                "at least two images of a class"
            )
        return audit

    def _start(self) -> None:
        """Say what will be done, and keep what later commands need."""
        self.audit.print()
        for note in self.created.notes:
            console.say(note)
        self.census.print()
        console.say(self.memory.line)
        out = self.out
        store_base(self.created.base)
        if self.config.overwrite:  # not before: with wrong data or weights the earlier run stays
            outputs.clear_run(out)
        write_text(out / "config.yaml", outputs.config_text(self.config))
        write_json(out / "audit.json", self.audit.to_dict())
        write_json(out / "census.json", self.census.to_dict())

    def _fit(self, saved: checkpoint.Saved | None) -> FitResult:
        config, ranks, spec = self.config, self.ranks, self.created.input
        workers = default_workers(config.workers, ranks.world)
        stream = ImageStream(
            self.audit.train, self.augment, batch_size=self.memory.batch, seed=config.seed, workers=workers, ranks=ranks
        )
        self.val_loader = make_loader(
            self.audit.val, eval_transform(spec), batch_size=config.eval_batch_size, shuffle=False, seed=config.seed,
            workers=workers,
        )  # fmt: skip
        objective = Classification(
            len(self.audit.classes), smoothing=config.smoothing, mixup=config.mixup, cutmix=config.cutmix,
            prob=config.mix_prob,
        )  # fmt: skip
        try:
            return fit(
                self.model, objective, [stream], config, self.precision, ranks=ranks,
                start=saved.fit if saved else None, on_epoch=self._epoch,
            )  # fmt: skip
        except DivergedError as error:
            if not self.best:
                raise
            if ranks.main:
                self._draw()
            kept = self.out / outputs.TASK
            raise DivergedError(f"{error}; the best pack, of epoch {self.best['epoch']}, is kept in {kept}") from error

    def _epoch(self, end: EpochEnd) -> Mapping[str, float]:
        """Evaluate, keep the pack if it is the best so far, and write what a resume needs."""
        metrics = evaluate_ranks(
            self.model, self.val_loader, self.audit.classes, self.ranks, show_progress=self.ranks.main
        )
        if not math.isfinite(metrics.loss):
            raise DivergedError(
                f"the held-out loss is {metrics.loss} after epoch {end.epoch}; use a lower --lr or a longer --warmup"
            )
        numbers = {"val_loss": metrics.loss, "val_top1": metrics.top1, "val_top5": metrics.top5}
        rank = (metrics.top1, -metrics.loss)
        better = not self.best or rank > (self.best["top1"], -self.best["loss"])
        if better:
            self.best = _remember(end.epoch, metrics)
        self.rows.append({**end.row, **numbers})
        if self.ranks.main:
            state = self.precision.master_state_dict(self.model)
            if better:
                self._save_pack(self.out / outputs.TASK, state, end.epoch, metrics)
            live = {name: state[name] for name in self.trained}
            saved = checkpoint.Saved(live, end.state(numbers), self.best, self.identity)
            checkpoint.save_state(self.out / outputs.LAST, saved)
            outputs.write_rows(self.out, self.rows)
            console.say(
                f"epoch {end.epoch}/{self.config.epochs}: loss {end.row['loss']:.3f}, held-out top-1 "
                f"{console.percent(metrics.top1)}, loss {metrics.loss:.3f}, "
                f"{end.row['images_per_second']:,.0f} images/s{', best so far' if better else ''}"
            )
        return numbers

    def _save_pack(self, path: Path, state: Mapping[str, Tensor], epoch: int, metrics: Metrics) -> None:
        config, created = self.config, self.created
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
            command=outputs.command_line(config),
        )
        save_task(path, state=state, created=created, card=card, trained=self.trained, dtype=config.pack_dtype)

    def _finish(self, result: FitResult) -> None:
        """Write the last pack and the plots; where packs are rounded, measure what was really stored."""
        out, config = self.out, self.config
        state = self.precision.master_state_dict(self.model)
        row = self.rows[-1]
        last = dataclasses.replace(
            self._best_metrics(), top1=row["val_top1"], top5=row["val_top5"], loss=row["val_loss"]
        )
        self._save_pack(out / outputs.TASK_LAST, state, int(row["epoch"]), last)
        if config.pack_dtype != "fp32":
            self.best = self._measure_stored(out / outputs.TASK)
            self._measure_stored(out / outputs.TASK_LAST)
        self._draw()
        metrics = self._best_metrics()
        console.say(
            f"best epoch {self.best['epoch']}: held-out top-1 {console.percent(metrics.top1)}, top-5 "
            f"{console.percent(metrics.top5)} of {metrics.count} images; pack {out / outputs.TASK}"
        )
        if len(self.rows) < config.epochs:
            console.say(f"stopped after {len(self.rows)} of {config.epochs} epochs; go on with --resume")

    def _draw(self) -> None:
        outputs.write_best(self.out, self._best_metrics())
        outputs.write_curves(self.out, self.rows)

    def _measure_stored(self, path: Path) -> dict[str, Any]:
        """Evaluate a pack from its file, so that its card tells what others will measure."""
        model = load_task(path).model.to(self.ranks.device)
        if self.precision.name == "bf16":
            model.to(torch.bfloat16)
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
