"""``pretrain``: from a folder of images to the backbone of a model, and all that a stopped run needs to go on."""

import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vtk import console
from vtk.card import Card, Regime, Transform
from vtk.data.decoding.rules import Decoding
from vtk.data.loading.eval_transform import eval_transform
from vtk.data.loading.loader import make_loader
from vtk.data.loading.samplers import mix
from vtk.data.loading.train_transform import train_transform
from vtk.data.mirroring import USUAL, Mirroring
from vtk.data.record import record_of
from vtk.data.sources.layout import refuse_inside
from vtk.errors import UsageError
from vtk.files import write_text
from vtk.formats import write_json
from vtk.models.arguments import parse_model_kwargs
from vtk.models.create import build_model, check_transforms
from vtk.models.inputs import blank_model, input_spec, patch_side
from vtk.options import expect
from vtk.training.engine.callbacks import Callback, Callbacks
from vtk.training.engine.compile_passes import check_compile
from vtk.training.engine.fit import DivergedError, fit
from vtk.training.engine.optimizers import check_optimizer
from vtk.training.engine.param_groups import describe_rates
from vtk.training.engine.precision import make_precision
from vtk.training.engine.processes import Ranks, open_ranks
from vtk.training.engine.progress import EpochLines
from vtk.training.engine.result import EpochEnd, FitState
from vtk.training.engine.save_schedule import Saves, StopSignals, refuse_stopped
from vtk.training.engine.step_plan import plan_steps, planned_epochs
from vtk.training.engine.streams import ImageStream, Stream
from vtk.training.finetune import run_callbacks
from vtk.training.options.running import parse_interval
from vtk.training.policies import policy
from vtk.training.pretrain import outputs
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.pretrain.held_out_loss import HeldOut
from vtk.training.pretrain.images import read_images
from vtk.training.pretrain.method import Setting, make_method
from vtk.training.pretrain.reconstruction_plots import SHOWN
from vtk.training.pretrain.result import PretrainResult
from vtk.training.pretrain.seeds import SeededStream, numbered
from vtk.training.runs import outputs as run_outputs
from vtk.training.runs import resume_state as checkpoint
from vtk.training.runs.image_list import tell_change, write_images
from vtk.training.runs.limit import limited
from vtk.training.runs.scoring import default_workers
from vtk.training.runs.tracking import MetricsFiles
from vtk.training.runs.view_lines import describe_views, settle_mirroring, warn_of_enlarging
from vtk.training.step_rules.sharpness import make_step_rule

_MODEL = 0x4D
"""Mixed into the seed of what a method adds to the backbone."""


def pretrain(config: PretrainConfig, *, callbacks: Sequence[Callback] = ()) -> PretrainResult:
    """Pre-train a timm model on a folder of images, and write its backbone, metrics and pictures to ``config.out``.

    Args:
        config: of the run.
        callbacks: told of every step, epoch and file (`vtk.Callback`); not of those of BEiT's tokenizer.

    Raises:
        UsageError: flags that are wrong, contradict each other or, on resume, differ from the run's.
        DataError: the folder, the weights or the output folder cannot be used.
        UnavailableError: the device is not here.
        DivergedError: the loss became infinite or not a number; the backbone of the epoch before is kept.
    """
    expect(config, PretrainConfig, "pretrain")
    if config.data is None:
        raise UsageError("no data: give a folder of images")
    out = config.out or Path("runs") / f"{config.data.resolve().name}-{config.method}"
    run = PretrainRun(config.resolved(), out, open_ranks(config.device))
    run.callbacks = run_callbacks(callbacks, run.ranks)
    return run.go()


class PretrainRun:
    """A run; `pretrain` drives it.

    Args:
        config: resolved.
        out: folder for the results.
        ranks: this process and the others.
    """

    def __init__(self, config: PretrainConfig, out: Path, ranks: Ranks) -> None:
        self.config, self.out, self.ranks = config, out, ranks
        self.method = make_method(config.method)
        self.rows: list[dict[str, float]] = []
        self.callbacks = Callbacks()

    def go(self) -> PretrainResult:
        """Do it."""
        command = run_outputs.command_line(cast(Any, self.config))
        with run_outputs.hold_run([self.out], command, main=self.ranks.main):
            try:
                return self._go()
            finally:
                self.callbacks.end()

    def _go(self) -> PretrainResult:
        out, config, ranks = self.out, self.config, self.ranks
        saved = self._load()
        if config.data is not None:
            refuse_inside(out, config.data)
        if ranks.main:
            run_outputs.check_run(out, overwrite=config.overwrite, resume=config.resume)
        self._build(saved.identity["flags"] if saved is not None else {}, checkpoint.decoding_of(saved))
        self._model()
        self.identity = self._identity()
        if saved is not None:
            checkpoint.check_identity(
                saved.identity,
                self.identity,
                cast(Any, PretrainConfig),
                change=lambda: tell_change(self.out, self.audit),
            )  # fmt: skip
            checkpoint.restore(self.model, saved.tensors, self.trained)
            self.rows = list(saved.fit.rows)
        if ranks.main:
            self._start()
        ranks.wait()
        self._objective()
        with StopSignals().heard(ranks) as signals:
            result = fit(
                self.model, self.objective, [self.stream], config, self.precision, step_rule=self.rule, ranks=ranks,
                start=saved.fit if saved else None, on_epoch=self._epoch, callbacks=self.callbacks,
                max_steps=config.max_steps, saves=Saves(self._midway, parse_interval(config.save_every), signals),
            )  # fmt: skip
            refuse_stopped(result, out / run_outputs.LAST, ranks)
        if ranks.main:
            self._finish()
        ranks.wait()
        file = out / run_outputs.TOKENIZER
        return PretrainResult(
            out, out / run_outputs.BACKBONE, config.method, self.rows, self.method.numbers(), result.images_per_second,
            self.precision.name, file if file.is_file() else None, config.trial,
        )  # fmt: skip

    def _load(self) -> checkpoint.Saved | None:
        """Check what can be checked before an image is read, and return the state of the run that is resumed."""
        config = self.config
        self.kwargs = parse_model_kwargs(config.model_kwargs)
        self.spec = input_spec(
            config.model, self.kwargs, config.img_size, config.in_chans, mean=config.mean, std=config.std,
            interpolation=config.interpolation, crop_pct=config.crop_pct, resize_mode=config.resize_mode,
        )  # fmt: skip
        stem = () if config.in_chans == 3 else (Transform("adapt_input", {"in_chans": config.in_chans}),)
        check_transforms(config.model, (*stem, *config.transforms()), self.kwargs, self.spec.size)
        check_compile(config.compile)
        self.precision = make_precision(config.precision, self.ranks.device)
        check_optimizer(config.optimizer, config.opt_kwargs)
        self.method.check(blank_model(config.model, self.kwargs), config, self.spec)
        self._make_views(Mirroring(USUAL if config.hflip is None else config.hflip, ""))
        return checkpoint.load_state(self.out / run_outputs.LAST) if config.resume else None

    def _make_views(self, mirroring: Mirroring) -> None:
        """Make what images go through."""
        config, (low, high) = self.config, self.config.crop_scale
        augment = train_transform(
            self.spec, crop_scale=(low, high), hflip=mirroring.probability, auto_augment=config.auto_augment,
            color_jitter=config.color_jitter,
        )  # fmt: skip
        self.mirroring, self.views = mirroring, self.method.transforms(augment, eval_transform(self.spec))

    def _build(self, before: Mapping[str, Any], decoding: Decoding | None) -> None:
        """Read the images, and make the backbone; ``before`` are flags of the run that is resumed."""
        config, ranks = self.config, self.ranks
        for turn in (True, False):  # the main process scans first; the others find its cache
            if ranks.main == turn:
                audit = read_images(
                    config, self.spec, labelled=self.method.labelled, show_progress=ranks.main, decoding=decoding
                )
                self.audit = limited(audit, config.limit, config.seed)
            ranks.wait()
        self.spec = self.audit.decoding.applied(self.spec)
        if ranks.main:
            warn_of_enlarging(self.audit, self.spec, patch_side(config.model, self.kwargs))
        found = settle_mirroring(config.hflip, before.get("hflip"), self.audit, config.in_chans)
        self._make_views(found)
        self.created = build_model(
            config.model, num_classes=0, img_size=config.img_size, weights=config.weights,
            pretrained=config.pretrained, seed=config.seed, drop_path_rate=config.drop_path, kwargs=self.kwargs,
            in_chans=config.in_chans, input=self.spec, transforms=config.transforms(),
        )  # fmt: skip
        self.workers = default_workers(config.workers, ranks.world)
        self.stream = self._stream()  # a batch size that cannot be is refused before anything is written
        steps = len(plan_steps([self.stream.sizes], config.accumulate))
        self.planned = planned_epochs(config.epochs, steps, config.max_steps)

    def _stream(self) -> Stream:
        config, samples = self.config, self.audit.train
        stream = ImageStream(
            samples if self.method.labelled else numbered(samples), self.views[0], batch_size=config.batch_size,
            seed=config.seed, workers=self.workers, ranks=self.ranks, max_pixels=config.max_pixels,
        )  # fmt: skip
        return stream if self.method.labelled else SeededStream(stream, config.seed)

    def _model(self) -> None:
        """Make the model to train; BEiT trains its tokenizer here."""
        config, ranks = self.config, self.ranks
        if ranks.main:
            outputs.print_images(self.audit)
            for note in self.created.notes:
                console.say(note)
        self.setting = Setting(config, self.spec, ranks, self.out, self.audit, self.workers)
        torch.manual_seed(mix(config.seed, _MODEL))
        self.model = self.method.model(self.created.model, self.setting)
        parameters = frozenset(n for n, p in self.model.named_parameters() if p.requires_grad)
        live = policy.live_buffers(self.model) & self.model.state_dict().keys()
        self.trained = policy.aliases(self.model, parameters) | live
        kind = getattr(self.method, "kind", None)  # of the table of radii
        self.rule, self.rule_line = make_step_rule(config, self.created.model, [self.spec], ranks, kind)

    def _start(self) -> None:
        """Say what will be trained, and write what later commands need; an earlier run stays until here."""
        out, config = self.out, self.config
        counts = [sum(p.numel() for p in m.parameters()) for m in (self.created.model, self.model)]
        console.say(f"{counts[0]:,} weights are kept as the backbone, {counts[1] - counts[0]:,} help to train them")
        console.say(describe_views(config, self.mirroring))
        console.say(describe_rates(self.model, config))
        if self.rule_line:
            console.say(self.rule_line)
        run_outputs.sweep(out)
        if config.overwrite:
            run_outputs.clear_run(out)
        if config.resume:
            run_outputs.clear_plots(out)
        write_text(out / "config.yaml", run_outputs.config_text(cast(Any, config)))
        write_json(out / "audit.json", self.audit.to_dict())
        write_images(out, self.audit)
        self.callbacks = self.callbacks.beside(MetricsFiles(out, self.rows), EpochLines("", self.planned))

    def _objective(self) -> None:
        """Make what is minimised, also of held-out images; BEiT writes its tokenizer here."""
        config, labelled = self.config, self.method.labelled
        self.objective = self.method.objective(self.setting)
        loader = make_loader(
            self.audit.val if labelled else numbered(self.audit.val), self.views[1],
            # contrasts are between the images of a batch, which in order would be of one class
            batch_size=config.eval_batch_size, shuffle=labelled, seed=config.seed, workers=self.workers,
            max_pixels=config.max_pixels,
        )  # fmt: skip
        self.held_out = HeldOut(loader, self.objective, self.ranks, seed=None if labelled else config.seed)

    def _identity(self) -> dict[str, Any]:
        """Return what a resumed run must share with the one it goes on with."""
        identity = checkpoint.identity(
            cast(Any, self.config), base_id=self.created.base.ref.id, audit=self.audit, precision=self.precision.name,
            world=self.ranks.world,
        )  # fmt: skip
        told = self.method.numbers().get("tokenizer")  # where its file is makes no difference, what is in it does
        identity["flags"]["hflip"] = self.mirroring.probability
        identity["flags"]["tokenizer"] = told and told["id"]
        return identity

    def _epoch(self, end: EpochEnd) -> Mapping[str, float]:
        """Score the epoch, write its backbone, and what a resume needs."""
        with end.averaged():
            found = self.held_out.score(self.model)
            self.precision.before_eval(self.model)
            numbers = {f"val_{name}": value for name, value in found.items()}
            if not math.isfinite(numbers["val_loss"]):
                raise DivergedError(
                    f"the held-out loss is {numbers['val_loss']} after epoch {end.epoch}; use a lower --lr or a longer "
                    "--warmup"
                )
            numbers |= {key: float(value) for key, value in self.config.trial.items()}
            self.rows.append({**end.row, **numbers})
            if self.ranks.main:
                state = self.precision.master_state_dict(self.model)
                outputs.save_backbone(self.out / run_outputs.BACKBONE, state, self._card())
                self.callbacks.save("backbone", self.out / run_outputs.BACKBONE, end.epoch)
        if self.ranks.main:
            told = "".join(f", {name} {value:.3f}" for name, value in found.items() if name != "loss")
            summary = (
                f"loss {end.row['loss']:.4f}, held-out {numbers['val_loss']:.4f}{told}, "
                f"{end.row['images_per_second']:,.0f} images/s"
            )
            self.callbacks.epoch(self.rows[-1], summary, best=False)
            self._save(end.state(numbers))
            self.callbacks.save("state", self.out / run_outputs.LAST, end.epoch)
            self.callbacks.flush()
        return numbers

    def _midway(self, state: FitState) -> None:
        """Write what a resume needs, within an epoch; the backbone stays that of the last whole one."""
        if self.ranks.main:
            self._save(state)
            self.callbacks.save("state", self.out / run_outputs.LAST, state.epoch + 1)
            self.callbacks.flush()

    def _save(self, state: FitState) -> None:
        live = self.model.state_dict()
        tensors: dict[str, Tensor] = {name: live[name].detach().cpu() for name in self.trained}
        # `tasks` tells the reader that there is no best epoch to look for
        saved = checkpoint.Saved(tensors, state, {"tasks": {}}, self.identity)
        checkpoint.save_state(self.out / run_outputs.LAST, saved)

    def _card(self) -> Card:
        config, row = self.config, self.rows[-1]
        metrics = {key.removeprefix("val_"): value for key, value in row.items() if key.startswith("val_")}
        started = config.weights is not None or config.pretrained
        return Card(
            model=self.created.spec,
            input=self.created.input,
            classes=(),
            transforms=self.created.transforms,
            metrics={
                **metrics, "count": len(self.audit.val), "epoch": int(row["epoch"]), "method": config.method,
                **self.method.numbers(), **({"started_from": self.created.base.ref.source} if started else {}),
            },
            data={
                "val_split": config.val_split, "seed": config.seed, "root": self.audit.root.resolve().name,
                "images": record_of(self.audit).to_dict(),
                **config.trial,
            },
            regime=Regime(self.precision.name, config.eval_batch_size, self.ranks.device.type),
            versions=run_outputs.versions(),
            command=run_outputs.command_line(cast(Any, config)),
        )  # fmt: skip

    def _finish(self) -> None:
        """Draw, and say where the backbone is."""
        val = self.audit.val
        shown = [val[i * len(val) // min(SHOWN, len(val))] for i in range(min(SHOWN, len(val)))]
        loader = make_loader(shown, eval_transform(self.spec), batch_size=SHOWN, shuffle=False, seed=0, workers=0,
                             max_pixels=self.config.max_pixels)  # fmt: skip
        images = next(iter(loader))[0].to(self.ranks.device)
        self.model.eval()
        with run_outputs.replace_plots(self.out) as staged:
            run_outputs.draw_curves(staged, self.rows)
            self.method.draw(self.model, images, dataclasses.replace(self.setting, out=staged))
        self.precision.before_eval(self.model)
        path = self.out / run_outputs.BACKBONE
        console.say(f"held-out loss {self.rows[-1]['val_loss']:.4f}; backbone {path}")
        if len(self.rows) < self.planned:
            console.say(f"stopped after {len(self.rows)} of {self.planned} epochs; go on with --resume")
        else:
            console.say(f"fine-tune from it: {self._next(path)}")

    def _next(self, path: Path) -> str:
        """Return the command that starts from the backbone; its card tells of model, size and stem."""
        channels = [] if self.config.in_chans == 3 else ["--in-chans", str(self.config.in_chans)]
        return shlex.join(["vtk", "finetune", "DATA", *channels, "--weights", str(path)])
