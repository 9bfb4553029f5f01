"""Several tasks in one run: their frozen weights are in memory once, and each keeps a pack of its own."""

import dataclasses
import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vtk import console
from vtk.errors import UsageError
from vtk.files import write_text
from vtk.training.engine.callbacks import Callbacks
from vtk.training.engine.fit import DivergedError, fit
from vtk.training.engine.precision import Fp32
from vtk.training.engine.processes import Ranks
from vtk.training.engine.result import EpochEnd, FinetuneResult, FitResult, FitState
from vtk.training.engine.save_schedule import Saves, StopSignals, refuse_stopped
from vtk.training.engine.step_plan import plan_joint, planned_epochs
from vtk.training.engine.streams import SampledStream, Stream, batch_counts
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.memory import Subject, choose_memory
from vtk.training.objectives.base import JointObjective
from vtk.training.options.running import parse_interval
from vtk.training.options.task_spec import parse_starts, parse_tasks
from vtk.training.runs import outputs
from vtk.training.runs import resume_state as checkpoint
from vtk.training.runs.image_list import tell_change
from vtk.training.runs.joint_model import JointModel, count_shared, share_frozen
from vtk.training.runs.run import Run
from vtk.training.runs.scoring import default_workers
from vtk.training.step_rules.sharpness import make_step_rule


@dataclass(frozen=True)
class JointResult:
    """What a run of several tasks left behind.

    Attributes:
        out: folder of the run; each task has a folder in it.
        tasks: by name.
        images_per_second: of training, all tasks together.
    """

    out: Path
    tasks: Mapping[str, FinetuneResult]
    images_per_second: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        tasks = {name: result.to_dict() for name, result in self.tasks.items()}
        return {"out": str(self.out), "images_per_second": self.images_per_second, "tasks": tasks}


class JointRun:
    """One run of several tasks.

    Args:
        config: with ``tasks``.
        out: folder of the run.
        ranks: this process and the others.
    """

    def __init__(self, config: FinetuneConfig, out: Path, ranks: Ranks) -> None:
        self.config, self.out, self.ranks = config, out, ranks
        self.specs = parse_tasks(config.tasks)
        self.starts = parse_starts(config.init_from, [spec.name for spec in self.specs])
        self.runs: dict[str, Run] = {}
        self.callbacks = Callbacks()

    def go(self) -> JointResult:
        """Train all tasks."""
        with outputs.hold_run([self.out], outputs.command_line(self.config), main=self.ranks.main):
            try:
                return self._go()
            finally:
                for run in self.runs.values():
                    Callbacks(own=run.callbacks.own).end()
                self.callbacks.end()

    def _go(self) -> JointResult:
        out, ranks = self.out, self.ranks
        saved = checkpoint.load_state(out / outputs.LAST) if self.config.resume else None
        if ranks.main:
            outputs.check_run(out, overwrite=self.config.overwrite, resume=self.config.resume)
            for folder in (out / spec.name for spec in self.specs):
                if folder.exists():  # what is refused now leaves no folders behind
                    outputs.check_run(folder, overwrite=self.config.overwrite, resume=self.config.resume)
        folders = [out / spec.name for spec in self.specs]
        with outputs.hold_run(folders, outputs.command_line(self.config), main=ranks.main):  # each is a run's, too
            return self._train(saved)

    def _train(self, saved: checkpoint.Saved | None) -> JointResult:
        out, ranks = self.out, self.ranks
        self.build(saved)
        self.settle(saved)
        workers = default_workers(self.config.workers, ranks.world * len(self.runs))
        for run in self.runs.values():
            run.feed(workers)
        self.identity = self._identity()
        if saved is not None:
            checkpoint.check_identity(saved.identity, self.identity, change=self._change)
            self._restore(saved)
            if saved.complete:
                if ranks.main:
                    outputs.sweep(out)
                    console.say(f"{out} is complete: nothing is left to do")
                    for run in self.runs.values():
                        run.describe_best()
                return self._result(math.nan)
        self.streams = self.plan_streams()
        if ranks.main:
            self._start()
        ranks.wait()
        result = self._fit(saved)
        if ranks.main:
            for run in self.runs.values():
                run.finish()
            if len(result.rows) == self.planned:
                checkpoint.save_complete(out / outputs.LAST, result.rows, self._best(), self.identity)
        for run in self.runs.values():
            run.stopped = result.stopped
        ranks.wait()
        return self._result(result.images_per_second)

    def _result(self, images_per_second: float) -> JointResult:
        found = {name: run.result(images_per_second) for name, run in self.runs.items()}
        return JointResult(self.out, found, images_per_second)

    def build(self, saved: checkpoint.Saved | None = None) -> None:
        """Read every task's images and make its model on the frozen tensors of the first.

        Args:
            saved: state of the run that is resumed.
        """
        first: Run | None = None
        runs = []
        for spec in self.specs:
            config = dataclasses.replace(
                self.config, data=spec.data, tasks=(), sampling=1.0, resume=False, out=None,
                img_size=self.config.img_size if spec.size is None else spec.size,
                init_from=(str(self.starts[spec.name]),) if spec.name in self.starts else (),
            )  # fmt: skip
            run = Run(config, self.out / spec.name, self.ranks, title=f"{spec.name}: ")
            run.callbacks = Callbacks(self.callbacks.given, control=self.callbacks.control, task=spec.name)
            try:
                run.load()  # what can be refused is refused before any image is read
            except UsageError as error:
                raise UsageError(f"task `{spec.name}`: {error}") from error
            run.decoding = checkpoint.decoding_of(saved)
            runs.append(run)
        before = saved.identity["flags"].get("hflip") if saved is not None else None
        for number, (spec, run) in enumerate(zip(self.specs, runs, strict=True)):
            if before is not None:  # one number where all tasks had the same
                run.before = {"hflip": before[number] if isinstance(before, list) else before}
            run.base = None if first is None else first.created.base
            run.command = outputs.command_line(self.config)
            run.build()
            if (images := len(run.audit.train)) < self.ranks.world:  # no batch has one for each process
                raise UsageError(
                    f"task `{spec.name}` has {images} training images for {self.ranks.world} processes; start at most "
                    f"{images}"
                )
            if first is None:
                first = run
            else:
                share_frozen(spec.name, run.model, first.model)
            self.runs[spec.name] = run
        self.model = JointModel({name: run.model for name, run in self.runs.items()})

    def settle(self, saved: checkpoint.Saved | None) -> None:
        """Choose memory mode and batch for all tasks at once."""
        runs = list(self.runs.values())
        subjects = [Subject(run.model, run.image_size) for run in runs]
        self.memory = choose_memory(
            subjects, self.config, runs[0].precision.name, self.ranks, images=max(len(r.audit.train) for r in runs),
            saved=saved.identity["flags"] if saved else None, count_all=self.config.dry_run,
        )  # fmt: skip
        self.config = self.config.settled(self.memory.mode, self.memory.batch)
        for run in runs:
            run.take(self.memory)
        self.rule, self.rule_line = make_step_rule(
            self.config, runs[0].model, [run.created.input for run in runs], self.ranks
        )

    def _identity(self) -> dict[str, Any]:
        each = [run.make_identity() for run in self.runs.values()]
        digests = {
            key: hashlib.sha256("\n".join(found[key] for found in each).encode()).hexdigest()
            for key in ("data", "images")
        }
        tasks = ["{}@{}x{}".format(name, *run.image_size[1:]) for name, run in self.runs.items()]
        mirrored = [found["flags"]["hflip"] for found in each]
        # sizes and folders are each task's own
        flags = {**each[0]["flags"], "img_size": None, "tasks": tasks, "sampling": self.config.sampling,
                 "hflip": mirrored[0] if len(set(mirrored)) == 1 else mirrored}  # fmt: skip
        return {**each[0], **digests, "flags": flags}

    def _change(self) -> str:
        """Say how the images of the first task that has others now differ from those the run started with."""
        told = {name: tell_change(run.out, run.audit) for name, run in self.runs.items()}
        return next((f"task `{name}`: {text}" for name, text in told.items() if text), "")

    def _restore(self, saved: checkpoint.Saved) -> None:
        for name, run in self.runs.items():
            own = checkpoint.of_task(saved, name)
            if not saved.complete:
                checkpoint.restore(run.model, own.tensors, run.trained)
            run.best, run.rows = own.best, own.fit.rows
            run.check_kept(complete=saved.complete)

    def _start(self) -> None:
        if self.config.overwrite:  # the earlier run's state, too: it must not outlive that run's packs
            outputs.clear_run(self.out)
        outputs.sweep(self.out)
        for name, run in self.runs.items():
            console.say(f"{name}: {run.audit.root}", style="bold")
            run.out.mkdir(exist_ok=True)
            run.start()
        console.say(
            f"{len(self.runs)} tasks share {count_shared(self.model):,} frozen weights; a step holds up to "
            f"{self.memory.batch} images of each"
        )
        console.say(self.memory.line)
        if self.rule is not None:
            console.say(self.rule_line)
        write_text(self.out / "config.yaml", outputs.config_text(self.config))

    def plan_streams(self) -> list[Stream]:
        """Return where each task's batches come from, and note how many epochs they make."""
        streams: list[Stream] = [run.stream for run in self.runs.values()]
        for i, batches in enumerate(batch_counts([stream.sizes for stream in streams], self.config.sampling)):
            if batches is not None:
                streams[i] = SampledStream(streams[i], batches)
        steps = len(plan_joint([stream.sizes for stream in streams], self.config.accumulate, 0))
        self.planned = planned_epochs(self.config.epochs, steps, self.config.max_steps)
        for run in self.runs.values():
            run.planned = self.planned
        return streams

    def _fit(self, saved: checkpoint.Saved | None) -> FitResult:
        objectives = [run.labelled for run in self.runs.values()]
        try:
            with StopSignals().heard(self.ranks) as signals:
                result = fit(
                    self.model, JointObjective(objectives), self.streams, self.config,
                    JointPrecision(list(self.runs.values())), step_rule=self.rule, ranks=self.ranks,
                    start=saved.fit if saved else None, on_epoch=self._epoch,
                    learners={name: run.model for name, run in self.runs.items()}, enough=self._enough,
                    callbacks=self.callbacks, max_steps=self.config.max_steps,
                    saves=Saves(self._midway, parse_interval(self.config.save_every), signals),
                )  # fmt: skip
                refuse_stopped(result, self.out / outputs.LAST, self.ranks)
            return result
        except DivergedError as error:
            kept = [run for run in self.runs.values() if run.best]
            if not kept:
                raise
            if self.ranks.main:
                for run in kept:
                    run.draw()
            raise DivergedError(f"{error}; the best packs so far are kept in {self.out}") from error

    def _enough(self) -> bool:
        """Whether every task has had enough: until then all go on, and each keeps its own best epoch."""
        return all(run.enough() for run in self.runs.values())

    def _epoch(self, end: EpochEnd) -> Mapping[str, float]:
        """Score every task, and write what a resume needs."""
        numbers: dict[str, float] = {}
        with end.averaged():
            for name, run in self.runs.items():
                row = {key: end.row[key] for key in ("epoch", "seconds", "images_per_second")}
                own = {key: f"{key} {name}" for key in ("loss", "lr", "perturbed_loss")}
                row |= {key: end.row[column] for key, column in own.items() if column in end.row}
                numbers |= {f"{key} {name}": value for key, value in run.score(row).items()}
        if self.ranks.main:
            self._save(end.state(numbers))
            self.callbacks.save("state", self.out / outputs.LAST, end.epoch)
            for callbacks in (*(run.callbacks for run in self.runs.values()), self.callbacks):
                callbacks.flush()
        return numbers

    def _midway(self, state: FitState) -> None:
        """Write what a resume needs, within an epoch."""
        if self.ranks.main:
            self._save(state)
            self.callbacks.save("state", self.out / outputs.LAST, state.epoch + 1)
            self.callbacks.flush()

    def _save(self, state: FitState) -> None:
        tensors = {f"{n}/{key}": t for n, run in self.runs.items() for key, t in run.live_state().items()}
        checkpoint.save_state(self.out / outputs.LAST, checkpoint.Saved(tensors, state, self._best(), self.identity))

    def _best(self) -> dict[str, Any]:
        """Return what is kept of each task's best epoch, and the numbers of all."""
        return {
            "tasks": {n: {k: v for k, v in run.best.items() if k != "confusion"} for n, run in self.runs.items()},
            "rows": {n: run.rows for n, run in self.runs.items()},
            "confusion": {n: run.best["confusion"] for n, run in self.runs.items() if run.best},
        }


class JointPrecision(Fp32):
    """The number formats of several tasks, each with the masters of its own; what they share is rounded once."""

    def __init__(self, runs: list[Run]) -> None:
        super().__init__(runs[0].precision.scaler)
        self.runs, self.name = runs, runs[0].precision.name

    def prepare(self, model: nn.Module, trained: Collection[str]) -> None:
        """Prepare every task's model; ``model`` is a `JointModel` of them."""
        for run in self.runs:
            precision = run.precision
            if run is not self.runs[0]:
                precision.share(self.runs[0].precision)
            precision.prepare(run.model, [n for n, p in run.model.named_parameters() if p.requires_grad])
            model.register_forward_pre_hook(precision.before_forward, with_kwargs=True)

    def before_eval(self, model: nn.Module) -> None:
        """Drop the casts of the last training step."""
        for run in self.runs:
            run.precision.before_eval(run.model)

    def master_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return every task's state dict, its keys after the number of the task."""
        states = [run.precision.master_state_dict(run.model) for run in self.runs]
        return {f"models.{i}.{key}": value for i, state in enumerate(states) for key, value in state.items()}
