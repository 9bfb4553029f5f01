"""One task's run: from a folder of images and a base to packs, metrics and plots."""

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
from vtk.data.audit import DataAudit, scan
from vtk.data.loader import make_loader
from vtk.data.transforms import eval_transform, train_transform
from vtk.errors import DataError
from vtk.evaluation.metrics import Metrics
from vtk.files import existing_dir, write_json, write_text
from vtk.models.arguments import parse_model_kwargs
from vtk.models.base import Base
from vtk.models.create import check_transforms, create_model
from vtk.models.inputs import input_spec
from vtk.tasks.base import store_base
from vtk.tasks.load import load_task, read_card
from vtk.tasks.lora import finish_lora, save_lora
from vtk.tasks.pack import save_task, update_card
from vtk.training import checkpoint, lora, outputs, policy
from vtk.training.census import take_census
from vtk.training.config import FinetuneConfig
from vtk.training.engine import DivergedError, fit
from vtk.training.memory import MemoryChoice, Subject, choose_memory
from vtk.training.objective import Classification
from vtk.training.parallel import Ranks
from vtk.training.precision import DTYPES, make_precision
from vtk.training.result import EpochEnd, FinetuneResult, FitResult
from vtk.training.scoring import default_workers, evaluate_ranks
from vtk.training.spec import parse_starts
from vtk.training.start import start_from
from vtk.training.streams import ImageStream


class Run:
    """One task's run: what its steps share.

    Args:
        config: of this task.
        out: its folder.
        ranks: this process and the others.
        base: weights already read, of an earlier task; by default the config says where they are.
        title: put before what is said of it.

    Attributes:
        audit: the images, after `build`.
        created: the model and where its tensors came from, after `build`.
        trained: state-dict keys that training may change, after `build`.
        best: the best epoch so far.
        rows: numbers of every epoch.
    """

    def __init__(
        self, config: FinetuneConfig, out: Path, ranks: Ranks, base: Base | None = None, title: str = ""
    ) -> None:
        self.config, self.out, self.ranks, self.base, self.title = config, out, ranks, base, title
        self.command = outputs.command_line(config)
        self.best: dict[str, Any] = {}
        self.identity: dict[str, Any] = {}
        self.rows: list[dict[str, float]] = []

    def go(self) -> FinetuneResult:
        """Run the task alone."""
        out, ranks = self.out, self.ranks
        saved = self.load()
        if ranks.main:
            outputs.check_run(out, overwrite=self.config.overwrite, resume=self.config.resume)
        self.build()
        self.settle(saved)
        self.identity = self.make_identity()
        if saved is not None:
            checkpoint.check_identity(saved.identity, self.identity)
            checkpoint.restore(self.model, saved.tensors)
            self.best, self.rows = saved.best, list(saved.fit.rows)
        if ranks.main:
            self.start()
        ranks.wait()
        result = self._fit(saved)
        if ranks.main:
            self.finish()
        ranks.wait()
        return self.result(result.images_per_second)

    def make_identity(self) -> dict[str, Any]:
        """Return what a resumed run must share with the one it goes on with."""
        return checkpoint.identity(
            self.config, base_id=self.created.base.ref.id, samples=self.audit.train, root=self.audit.root,
            precision=self.precision.name, world=self.ranks.world,
        )  # fmt: skip

    @property
    def image_size(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        image = self.created.input
        return image.in_chans, image.height, image.width

    def result(self, images_per_second: float) -> FinetuneResult:
        """Return what the run left behind."""
        out = self.out
        return FinetuneResult(
            out, out / outputs.TASK, out / outputs.TASK_LAST, self._best_metrics(), self.best["epoch"], self.rows,
            self.census, images_per_second, self.precision.name, self.memory.mode, self.memory.batch,
            out / outputs.ADAPTER if self.lora is not None else None,
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
        self.precision = make_precision(config.precision, self.ranks.device, train=not config.dry_run)
        low, high = config.crop_scale
        self.augment = train_transform(
            self.spec, crop_scale=(low, high), hflip=config.hflip, auto_augment=config.auto_augment,
            color_jitter=config.color_jitter, reprob=config.reprob,
        )  # fmt: skip
        return checkpoint.load_state(self.out / outputs.LAST) if config.resume else None

    def build(self) -> None:
        """Read the data, make the model, and choose what is trained."""
        config = self.config
        self.audit = self._scan()
        self.created = create_model(
            config.model, num_classes=len(self.audit.classes), img_size=config.img_size, weights=config.weights,
            pretrained=config.pretrained, seed=config.seed, drop_path_rate=config.drop_path, kwargs=self.kwargs,
            input=self.spec, transforms=config.transforms(), base=self.base,
        )  # fmt: skip
        self.model = self.created.model
        made: frozenset[str] = frozenset()
        if self.created.transforms:  # without one, a tensor that the base lacks is the model's own
            made = policy.created_names(self.created.key_map, self.model)
        self.lora = lora.inject(self.created, config, made) if config.train == "lora" else None
        trained = policy.select(self.model, config.train, made)
        policy.apply(self.model, trained)
        self.trained = trained | (policy.live_buffers(self.model) & self.model.state_dict().keys())
        self.census = take_census(self.model, trained, config.train)
        for pack in parse_starts(config.init_from, ()).values():
            self.created.notes += start_from(pack, self.created, self.audit.classes, trained, config.weights)

    def settle(self, saved: checkpoint.Saved | None) -> None:
        """Choose the memory mode, and the batch where it is to be chosen."""
        config = self.config
        choice = choose_memory(
            [Subject(self.model, self.image_size)], config, self.precision.name, self.ranks,
            images=len(self.audit.train), saved=saved.identity["flags"] if saved else None, count_all=config.dry_run,
        )  # fmt: skip
        self.take(choice)

    def take(self, memory: MemoryChoice) -> None:
        """Go on with this memory mode and batch."""
        self.memory = memory
        self.config = dataclasses.replace(self.config, memory=memory.mode, batch_size=memory.batch)

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

    def start(self) -> None:
        """Say what will be done, and keep what later commands need."""
        self.audit.print()
        for note in self.created.notes:
            console.say(note)
        self.census.print()
        if self.lora is not None:
            lora.warn_of_shared(self.model, self.lora)
        console.say(self.memory.line)
        out = self.out
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

    def feed(self, workers: int) -> tuple[ImageStream, Classification]:
        """Open the images, with so many loading processes; return the stream to train on, and what to minimise."""
        config = self.config
        self.val_loader = make_loader(
            self.audit.val, eval_transform(self.created.input), batch_size=config.eval_batch_size, shuffle=False,
            seed=config.seed, workers=workers,
        )  # fmt: skip
        stream = ImageStream(
            self.audit.train, self.augment, batch_size=self.memory.batch, seed=config.seed, workers=workers,
            ranks=self.ranks,
        )  # fmt: skip
        objective = Classification(
            len(self.audit.classes), smoothing=config.smoothing, mixup=config.mixup, cutmix=config.cutmix,
            prob=config.mix_prob,
        )  # fmt: skip
        return stream, objective

    def _epoch(self, end: EpochEnd) -> Mapping[str, float]:
        """Score the epoch, and write what a resume needs."""
        numbers = self.score(end.row)
        if self.ranks.main:
            saved = checkpoint.Saved(self.live_state(), end.state(numbers), self.best, self.identity)
            checkpoint.save_state(self.out / outputs.LAST, saved)
        return numbers

    def live_state(self) -> dict[str, Tensor]:
        """Return what training changes, on the CPU."""
        state = self.precision.master_state_dict(self.model)
        return {name: state[name] for name in self.trained}

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
