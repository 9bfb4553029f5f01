"""One task's run: training, and what is kept of it: packs, metrics, plots, and the state to resume from."""

import math
from collections.abc import Mapping

from torch import Tensor

from vtk import console
from vtk.evaluation import choice
from vtk.files import write_text
from vtk.formats import write_json
from vtk.training.engine.fit import DivergedError, fit
from vtk.training.engine.param_groups import describe_rates
from vtk.training.engine.progress import EpochLines
from vtk.training.engine.result import EpochEnd, FinetuneResult, FitResult, FitState
from vtk.training.engine.save_schedule import Saves, StopSignals, refuse_stopped
from vtk.training.options.running import parse_interval
from vtk.training.policies import lora_layers as lora
from vtk.training.runs import outputs
from vtk.training.runs import resume_state as checkpoint
from vtk.training.runs.image_list import tell_change, write_images
from vtk.training.runs.packs import Packs
from vtk.training.runs.scoring import default_workers
from vtk.training.runs.tracking import open_trackers


class Run(Packs):
    """One task's run, alone or as a part of a `vtk.training.runs.joint.JointRun`."""

    def go(self) -> FinetuneResult:
        """Run the task alone."""
        with outputs.hold_run([self.out], self.command, main=self.ranks.main):
            try:
                return self._go()
            finally:
                self.callbacks.end()

    def _go(self) -> FinetuneResult:
        out, ranks = self.out, self.ranks
        saved = self.load()
        self.before = saved.identity["flags"] if saved is not None else {}
        if ranks.main:
            outputs.check_run(out, overwrite=self.config.overwrite, resume=self.config.resume)
        self.build()
        self.settle(saved)
        self.feed(default_workers(self.config.workers, ranks.world))  # what is wrong shows before old files go
        self.identity = self.make_identity()
        if saved is not None:
            checkpoint.check_identity(
                saved.identity, self.identity, type(self.config), change=lambda: tell_change(self.out, self.audit)
            )
            if not saved.complete:
                checkpoint.restore(self.model, saved.tensors, self.trained)
            self.best, self.rows = saved.best, list(saved.fit.rows)
            self.check_kept(complete=saved.complete)
            if saved.complete:
                if ranks.main:
                    outputs.sweep(out)
                    console.say(f"{out} is complete: nothing is left to do")
                    self.describe_best()
                return self.result(math.nan)
        if ranks.main:
            self.start()
        ranks.wait()
        result = self._fit(saved)
        self.stopped = result.stopped
        if ranks.main:
            self.finish()
            if len(self.rows) == self.planned:
                checkpoint.save_complete(out / outputs.LAST, result.rows, self.best, self.identity)
        ranks.wait()
        return self.result(result.images_per_second)

    def result(self, images_per_second: float) -> FinetuneResult:
        """Return what the run left behind."""
        out = self.out
        return FinetuneResult(
            out, self.best_path, self.last_path, self.best_metrics(), self.best["epoch"], self.rows,
            self.census, images_per_second, self.precision.name, self.memory.mode, self.memory.batch,
            out / outputs.ADAPTER if self.lora is not None else None, self.config.chosen_metric,
            (self.stopped or self.enough()) and len(self.rows) < self.planned, self.config.trial,
        )  # fmt: skip

    def start(self) -> None:
        """Say what will be done, and keep what later commands need."""
        self.audit.print()
        for note in self.created.notes:
            console.say(note)
        self.print_census()
        if self.lora is not None:
            lora.warn_of_shared(self.model, self.lora)
        console.say(f"{self.title}{describe_rates(self.model, self.config.scaled())}")
        if not self.title:  # of several tasks it is one line for all
            console.say(self.memory.line)
            if self.rule is not None:
                console.say(self.rule_line)
        for line in self.describe_feed():
            console.say(f"{self.title}{line}")
        out = self.out
        outputs.sweep(out)
        self.store_base()
        if self.config.overwrite:  # not before: with wrong data or weights the earlier run stays
            outputs.clear_run(out)
        if self.config.resume:
            outputs.clear_plots(out)
        write_text(out / "config.yaml", outputs.config_text(self.config))
        write_json(out / "audit.json", self.audit.to_dict())
        write_images(out, self.audit)
        write_json(out / "census.json", self.census.to_dict())
        trackers = open_trackers(self.config.track, out, self.command, self.rows)
        self.callbacks = self.callbacks.beside(*trackers, EpochLines(self.title, self.planned))

    def _fit(self, saved: checkpoint.Saved | None) -> FitResult:
        try:
            with StopSignals().heard(self.ranks) as signals:
                result = fit(
                    self.model, self.objective, [self.stream], self.config.scaled(), self.precision,
                    step_rule=self.step_rule(), ranks=self.ranks, start=saved.fit if saved else None,
                    on_epoch=self._epoch, enough=self.enough, callbacks=self.callbacks,
                    max_steps=self.config.max_steps,
                    saves=Saves(self._midway, parse_interval(self.config.save_every), signals),
                )  # fmt: skip
                refuse_stopped(result, self.out / outputs.LAST, self.ranks)
            return result
        except DivergedError as error:
            if not self.best:
                raise
            if self.ranks.main:
                self.finish_adapter()
                self.draw()
            raise DivergedError(
                f"{error}; the best {self.what}, of epoch {self.best['epoch']}, is kept in {self.best_path}"
            ) from error

    def _epoch(self, end: EpochEnd) -> Mapping[str, float]:
        """Score the epoch, and write what a resume needs."""
        with end.averaged():
            numbers = self.score(end.row)
        if self.ranks.main:
            saved = checkpoint.Saved(self.live_state(), end.state(numbers), self.best, self.identity)
            checkpoint.save_state(self.out / outputs.LAST, saved)
            self.callbacks.save("state", self.out / outputs.LAST, end.epoch)
            self.callbacks.flush()
        return numbers

    def _midway(self, state: FitState) -> None:
        """Write what a resume needs, within an epoch; packs stay those of whole epochs."""
        if self.ranks.main:
            saved = checkpoint.Saved(self.live_state(), state, self.best, self.identity)
            checkpoint.save_state(self.out / outputs.LAST, saved)
            self.callbacks.save("state", self.out / outputs.LAST, state.epoch + 1)
            self.callbacks.flush()

    def live_state(self) -> dict[str, Tensor]:
        """Return what training changes, on the CPU: masters, and buffers as they are; of a CPU model no copies."""
        state = self.model.state_dict()
        return {name: state[name].detach().cpu() for name in self.trained}

    def score(self, row: Mapping[str, float]) -> Mapping[str, float]:
        """Evaluate after an epoch whose numbers are ``row``, and keep the pack if it is the best so far."""
        epoch = int(row["epoch"])
        metrics = self.evaluate(show_progress=self.ranks.main)
        if not math.isfinite(metrics.loss):
            raise DivergedError(
                f"the held-out loss is {metrics.loss} after epoch {epoch}; use a lower --lr or a longer --warmup"
            )
        numbers = {f"val_{name}": value for name, value in metrics.numbers().items()}
        better = self.judge(epoch, metrics)
        numbers |= {key: float(value) for key, value in self.config.trial.items()}
        self.rows.append({**row, **numbers})
        if self.ranks.main:
            if better:
                self.keep_best(self.precision.master_state_dict(self.model))
                self.callbacks.save(self.what, self.best_path, epoch, best=True)
            told = metrics.headline(self.config.chosen_metric)
            summary = (
                f"loss {row['loss']:.3f}, held-out {told}, {row['images_per_second']:,.0f} images/s"
                f"{', best so far' if better else ''}"
            )
            self.callbacks.epoch(self.rows[-1], summary, best=better)
        return numbers

    def finish(self) -> None:
        """Write what the last epoch gave, and the plots."""
        config = self.config
        self.keep_last(self.precision.master_state_dict(self.model))
        self.callbacks.save(self.what, self.last_path, int(self.rows[-1]["epoch"]))
        self.callbacks.flush()
        self.draw()
        self.describe_best()
        if len(self.rows) < self.planned:
            more = f"stopped after {len(self.rows)} of {self.planned} epochs; go on with --resume"
            if self.enough():
                name = choice.names(config.multi_label)[config.chosen_metric]
                more += f" and a larger --patience: no better {name} in {self.fruitless} epochs"
            console.say(f"{self.title}{more}")

    def describe_best(self) -> None:
        """Say how good the best epoch is, and of what."""
        config, metrics = self.config, self.best_metrics()
        given = " and ".join(f"--{name.replace('_', '-')} {value}" for name, value in config.trial.items())
        trial = f", a trial with {given}" if given else ""
        console.say(
            f"{self.title}best epoch {self.best['epoch']}: held-out {metrics.headline(config.chosen_metric)}, of "
            f"{metrics.count} images{trial}; {self.what} {self.best_path}"
        )
