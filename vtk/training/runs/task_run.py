"""One task while its run trains: evaluates each epoch, has the best written, and reports the result."""

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from vtk import console
from vtk.evaluation import choice
from vtk.evaluation.temperature import describe
from vtk.files import write_text
from vtk.formats import write_json
from vtk.models.initialization.draw import describe_init
from vtk.packs.cards import read_card
from vtk.training.engine.callback_list import Callbacks
from vtk.training.engine.fitting import DivergedError
from vtk.training.engine.param_groups import describe_rates
from vtk.training.engine.progress import EpochLines
from vtk.training.engine.result import FinetuneResult
from vtk.training.memory import MemoryChoice
from vtk.training.runs import outputs
from vtk.training.runs import resume_state as state
from vtk.training.runs.command_line import config_text, config_values
from vtk.training.runs.held_out_answers import HeldOutAnswers
from vtk.training.runs.history import History
from vtk.training.runs.image_list import write_images
from vtk.training.runs.prepare import PreparedTask
from vtk.training.runs.tracking import complete_trackers, open_trackers
from vtk.training.runs.writer import Writer

T = TypeVar("T")


class TaskRun:
    """One task of a run: the only one, or one of several.

    Args:
        prepared: the task.
        writer: class of the writer of its files.
        planned: epochs of the run.
        callbacks: called on its epochs and files, in the main process.

    Attributes:
        history: numbers of its epochs.
    """

    def __init__(
        self, prepared: PreparedTask, writer: type[Writer], planned: int, callbacks: Callbacks
    ) -> None:  # fmt: skip
        config = prepared.config
        self.prepared, self.planned, self.callbacks = prepared, planned, callbacks
        self.task, self.plan = prepared.task, prepared.task.plan
        classes = self.task.audit.classes
        self.history = History(classes, config.chosen_metric, config.patience, config.multi_label)
        self.writer = writer(prepared, self.history)

    def load(self, saved: state.Saved) -> None:
        """Continue from the saved state of this task.

        Raises:
            DataError: the state does not fit the model, or the files of the best epoch are gone.
        """
        if not saved.complete:
            state.restore(self.task.model, saved.tensors, self.task.trained)
        self.history.best, self.history.rows = saved.best, list(saved.fit.rows)
        self.writer.check_files(complete=saved.complete)

    def begin(self, lines: tuple[str, ...] = ()) -> None:
        """Print what will be done, and write what later commands need; an earlier run is replaced from here on.

        Args:
            lines: of the whole run, which stand among those of its only task.
        """
        task, plan, config = self.task, self.plan, self.prepared.config
        task.audit.print()
        for note in task.created.notes:
            console.say(note)
        if line := describe_init(task.created.init, task.created.decided):
            console.say(f"{plan.title}{line}")
        self.writer.print_census()
        console.say(f"{plan.title}{describe_rates(task.model, config.scaled())}")
        for line in lines:
            console.say(line)
        for line in self.prepared.describe():
            console.say(f"{plan.title}{line}")
        out = plan.out
        outputs.sweep(out)
        self.writer.store_base()
        if config.overwrite:  # not before: with wrong data or weights the earlier run stays
            outputs.clear_run(out)
        if config.resume:
            outputs.clear_plots(out)
        write_text(out / "config.yaml", config_text(config))
        write_json(out / "audit.json", task.audit.to_dict())
        write_images(out, task.audit)
        write_json(out / "census.json", task.census.to_dict())
        self.callbacks.attach(*self._track(open_trackers), EpochLines(plan.title, self.planned))

    def _track(self, open_: Callable[..., T]) -> T:
        """Call a function of `vtk.training.runs.tracking` with what it needs of this task."""
        config, plan = self.prepared.config, self.plan
        return open_(
            config.track, plan.out, plan.command, self.history.rows, home=plan.out.parent if plan.title else None,
            values=config_values(config),
        )  # fmt: skip

    def write_missing(self) -> None:
        """Write what a complete run lacks: files that its options now ask for, and epochs in its trackers."""
        self.writer.write_missing()
        self._track(complete_trackers)

    def live_state(self) -> dict[str, Tensor]:
        """Return the tensors that training changes, on the CPU: fp32 masters, and buffers; of a CPU model no copies."""
        tensors = self.task.model.state_dict()
        return {name: tensors[name].detach().cpu() for name in self.task.trained}

    def score(self, row: Mapping[str, float]) -> Mapping[str, float]:
        """Evaluate after an epoch whose numbers are ``row``, write the weights if it is the best, and return metrics.

        Raises:
            DivergedError: the held-out loss is not finite.
        """
        epoch, main, config = int(row["epoch"]), self.plan.ranks.main, self.prepared.config
        answers = HeldOutAnswers(self.task, config.seed)
        with self.writer.as_stored():
            metrics = self.prepared.score(self.task.model, self.plan.ranks, show_progress=main, keep=answers.keep)
        self.writer.answers = answers
        if not math.isfinite(metrics.loss):
            raise DivergedError(
                f"the held-out loss is {metrics.loss} after epoch {epoch}; use a lower --lr or a longer --warmup"
            )
        numbers = {f"val_{name}": value for name, value in metrics.numbers().items()}
        better = self.history.judge(epoch, metrics)
        numbers |= {key: float(value) for key, value in config.trial.items()}
        self.history.rows.append({**row, **numbers})
        if main:
            if better:
                self.writer.write_best(self.plan.precision.master_state_dict(self.task.model))
                self.callbacks.save(self.writer.what, self.writer.best_path, epoch, best=True)
            summary = (
                f"loss {row['loss']:.3f}, held-out {metrics.headline(config.chosen_metric)}, "
                f"{row['images_per_second']:,.0f} images/s{', best so far' if better else ''}"
            )
            self.callbacks.epoch(self.history.rows[-1], summary, best=better)
        return numbers

    def draw(self) -> None:
        """Write the plots and the table of classes."""
        outputs.write_plots(self.plan.out, self.history.rows, self.history.best_metrics())

    def finish(self) -> None:
        """Write the weights of the last epoch and the plots."""
        config, rows = self.prepared.config, self.history.rows
        self.writer.write_last(self.plan.precision.master_state_dict(self.task.model))
        self.callbacks.save(self.writer.what, self.writer.last_path, int(rows[-1]["epoch"]))
        self.callbacks.flush()
        self.draw()
        self.print_best()
        if len(rows) < self.planned:
            more = f"stopped after {len(rows)} of {self.planned} epochs; continue with --resume"
            if self.history.out_of_patience():
                name = choice.names(config.multi_label)[config.chosen_metric]
                more += f" and a larger --patience: no better {name} in {self.history.epochs_since_best} epochs"
            console.say(f"{self.plan.title}{more}")

    def print_best(self) -> None:
        """Print the metrics of the best epoch."""
        config, metrics = self.prepared.config, self.history.best_metrics()
        flags = " and ".join(f"--{name.replace('_', '-')} {value}" for name, value in config.trial.items())
        trial = f", a trial with {flags}" if flags else ""
        console.say(
            f"{self.plan.title}best epoch {self.history.best['epoch']}: held-out "
            f"{metrics.headline(config.chosen_metric)}, of {metrics.count} images{trial}; {self.writer.what} "
            f"{self.writer.best_path}"
        )
        if (calibration := read_card(self.writer.best_path).calibration) is not None:
            console.say(f"{self.plan.title}{describe(calibration)}")

    def result(self, images_per_second: float, memory: MemoryChoice, *, stopped: bool) -> FinetuneResult:
        """Return what the run left behind.

        Args:
            images_per_second: of training.
            memory: mode and batch size.
            stopped: whether a callback ended the run.
        """
        history, config = self.history, self.prepared.config
        early = (stopped or history.out_of_patience()) and len(history.rows) < self.planned
        return FinetuneResult(
            self.plan.out, self.writer.best_path, self.writer.last_path, history.best_metrics(), history.best["epoch"],
            history.rows, self.task.census, images_per_second, self.plan.precision.name, memory.mode, memory.batch,
            self.writer.adapter, config.chosen_metric, early, config.trial,
            config.train_share,
        )  # fmt: skip
