"""A run of one task, from its lock on the folder to its result."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from vtk import console
from vtk.training.engine.callback_list import Callbacks, main_callbacks
from vtk.training.engine.callbacks import Callback
from vtk.training.engine.fitting import DivergedError, fit
from vtk.training.engine.processes import open_ranks
from vtk.training.engine.result import EpochEnd, FinetuneResult, FitResult, FitState
from vtk.training.engine.save_schedule import Saves, StopSignals, refuse_stopped
from vtk.training.objectives.distillation import Trained
from vtk.training.options.running import parse_interval
from vtk.training.run_config import RunConfig
from vtk.training.runs import outputs
from vtk.training.runs import resume_state as state
from vtk.training.runs.command_line import command_line
from vtk.training.runs.identity import check_identity
from vtk.training.runs.image_list import describe_change
from vtk.training.runs.plan import plan_run, run_folder
from vtk.training.runs.prepare import PreparedRun, load_saved, prepare_run
from vtk.training.runs.task_run import TaskRun
from vtk.training.runs.writer import Writer


class Run:
    """A run of one task.

    Args:
        prepared: all that the engine takes.
        task: the task of the run, with its writer.
        saved: state of the run that is resumed; None for a new one.
    """

    def __init__(self, prepared: PreparedRun, task: TaskRun, saved: state.Saved | None) -> None:
        self.prepared, self.task, self.saved = prepared, task, saved
        self.identity = task.prepared.identity()

    def go(self) -> FinetuneResult:
        """Train, and return what the run left behind.

        Raises:
            UsageError: options differ from those of the run that is resumed.
            DataError: base, images or files do.
            DivergedError: the loss became infinite or not a number.
        """
        out, ranks, task, saved = self.task.plan.out, self.prepared.ranks, self.task, self.saved
        if saved is not None:
            config, audit = self.prepared.config, task.task.audit
            check_identity(saved.identity, self.identity, type(config), change=lambda: describe_change(out, audit))
            task.load(saved)
            if saved.complete:
                if ranks.main:
                    outputs.sweep(out)
                    console.say(f"{out} is complete: nothing is left to train")
                    task.print_best()
                    task.write_missing()
                return task.result(math.nan, self.prepared.settled.memory, stopped=False)
        if ranks.main:
            rule = (self.prepared.settled.rule_line,) if self.prepared.settled.step_rule is not None else ()
            task.begin((self.prepared.settled.memory.line, *rule))
        ranks.wait()
        result = self._fit()
        if ranks.main:
            task.finish()
            if len(task.history.rows) == self.prepared.planned:
                state.save_complete(out / outputs.LAST, result.rows, task.history.best, self.identity)
        ranks.wait()
        return task.result(result.images_per_second, self.prepared.settled.memory, stopped=result.stopped)

    def _fit(self) -> FitResult:
        task = self.task
        try:
            return fit_prepared(
                self.prepared, task.plan.out, self.saved, task.callbacks, on_epoch=self._epoch, save=self._save,
                enough=task.history.out_of_patience,
            )  # fmt: skip
        except DivergedError as error:
            if not task.history.best:
                raise
            if self.prepared.ranks.main:
                task.writer.complete_best()
                task.draw()
            raise DivergedError(
                f"{error}; the best {task.writer.what}, of epoch {task.history.best['epoch']}, is kept in "
                f"{task.writer.best_path}"
            ) from error

    def _epoch(self, end: EpochEnd) -> Mapping[str, float]:
        """Evaluate the epoch, and write the state that a resumed run continues from."""
        with end.averaged():
            numbers = self.task.score(end.row)
        if self.prepared.ranks.main:
            self._save(end.state(numbers), end.epoch)
        return numbers

    def _save(self, fit_state: FitState, epoch: int) -> None:
        task, last = self.task, self.task.plan.out / outputs.LAST
        state.save_state(last, state.Saved(task.live_state(), fit_state, task.history.best, self.identity))
        task.callbacks.save("state", last, epoch)
        task.callbacks.flush()


def fit_prepared(
    prepared: PreparedRun, out: Path, saved: state.Saved | None, callbacks: Callbacks, *,
    on_epoch: Callable[[EpochEnd], Mapping[str, float]], save: Callable[[FitState, int], None],
    enough: Callable[[], bool],
) -> FitResult:  # fmt: skip
    """Train what was prepared, until it is done, a callback stops it or a signal comes.

    Args:
        prepared: all that the engine takes.
        out: folder of the run.
        saved: state of the run that is resumed.
        callbacks: called on steps.
        on_epoch: evaluates an epoch.
        save: writes a state within an epoch, whose number from 1 is given; packs stay those of whole epochs.
        enough: whether the run stops before the next epoch.

    Raises:
        StoppedError: a signal came, and the state was saved.
        DivergedError: the loss is not finite.
    """
    ranks, config = prepared.ranks, prepared.config

    def write(fit_state: FitState) -> None:
        if ranks.main:
            save(fit_state, fit_state.epoch + 1)

    with StopSignals().listen(ranks) as signals:
        result = fit(
            prepared.model, prepared.objective, prepared.streams, config, prepared.precision,
            step_rule=prepared.settled.step_rule, ranks=ranks, start=saved.fit if saved else None, on_epoch=on_epoch,
            learners=prepared.learners, enough=enough, callbacks=callbacks, max_steps=config.max_steps,
            saves=Saves(write, parse_interval(config.save_every), signals),
        )  # fmt: skip
        refuse_stopped(result, out / outputs.LAST, ranks)
    return result


@contextlib.contextmanager
def open_run(
    config: RunConfig, writer: type[Writer], *, callbacks: Sequence[Callback] = (), teacher: Trained | None = None
) -> Iterator[Run]:
    """Return a context with a prepared run of one task, inside of which nobody else writes to its folder.

    Args:
        config: options of the run.
        writer: class of the writer of its files.
        callbacks: called in the main process; ``on_end`` with the end of the context.
        teacher: a loaded model, in place of what ``--distill-from`` names.

    Raises:
        UsageError: options that are wrong or do not fit the model or the images.
        DataError: images, weights or the output folder that cannot be used.
        UnavailableError: a device or a package that is missing.
    """
    out, ranks = run_folder(config), open_ranks(config.device)
    called = main_callbacks(callbacks, ranks)
    with outputs.hold_run([out], command_line(config), main=ranks.main):
        try:
            plan = plan_run(config, out, ranks)
            saved = load_saved(config, out)
            if ranks.main:
                outputs.check_run(out, overwrite=config.overwrite, resume=config.resume)
            prepared = prepare_run(plan, saved, teacher)  # what is wrong shows before old files go
            (task,) = prepared.tasks.values()
            yield Run(prepared, TaskRun(task, writer, prepared.planned, called), saved)
        finally:
            called.end()
