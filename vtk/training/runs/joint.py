"""A run of several tasks: their frozen weights are in memory once, and each keeps a pack of its own."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtk import console
from vtk.files import write_text
from vtk.training.engine.callback_list import Callbacks, main_callbacks
from vtk.training.engine.callbacks import Callback
from vtk.training.engine.fitting import DivergedError
from vtk.training.engine.processes import open_ranks
from vtk.training.engine.result import EpochEnd, FinetuneResult, FitResult, FitState
from vtk.training.options.task_spec import parse_tasks
from vtk.training.run_config import RunConfig
from vtk.training.runs import outputs
from vtk.training.runs import resume_state as state
from vtk.training.runs.command_line import command_line, config_text
from vtk.training.runs.identity import check_identity
from vtk.training.runs.image_list import describe_change
from vtk.training.runs.joint_model import count_shared
from vtk.training.runs.joint_state import joint_best, joint_identity, joint_state, of_task
from vtk.training.runs.joint_tasks import joint_folder, prepare_joint
from vtk.training.runs.prepare import PreparedRun, load_saved
from vtk.training.runs.run import fit_prepared
from vtk.training.runs.task_run import TaskRun
from vtk.training.runs.writer import Writer


@dataclass(frozen=True)
class JointResult:
    """Result of a run of several tasks.

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
    """A run of several tasks.

    Args:
        prepared: all that the engine takes.
        out: folder of the run.
        tasks: with their writers, by name.
        saved: state of the run that is resumed; None for a new one.
        callbacks: called on steps, in the main process.
    """

    def __init__(
        self, prepared: PreparedRun, out: Path, tasks: Mapping[str, TaskRun], saved: state.Saved | None,
        callbacks: Callbacks,
    ) -> None:  # fmt: skip
        self.prepared, self.out, self.tasks, self.saved = prepared, out, tasks, saved
        self.callbacks = callbacks
        self.identity = joint_identity(prepared)

    def go(self) -> JointResult:
        """Train all tasks, and return what the run left behind.

        Raises:
            UsageError: options differ from those of the run that is resumed.
            DataError: base, images or files do.
            DivergedError: a loss became infinite or not a number.
        """
        out, main, tasks, saved = self.out, self.prepared.ranks.main, self.tasks, self.saved
        if saved is not None:
            check_identity(saved.identity, self.identity, type(self.prepared.config), change=self._describe_change)
            for name, task in tasks.items():
                task.load(of_task(saved, name))
            if saved.complete:
                if main:
                    outputs.sweep(out)
                    console.say(f"{out} is complete: nothing is left to train")
                    for task in tasks.values():
                        task.print_best()
                        task.write_missing()
                return self._result(math.nan, stopped=False)
        if main:
            self._begin()
        self.prepared.ranks.wait()
        result = self._fit()
        if main:
            for task in tasks.values():
                task.finish()
            if len(result.rows) == self.prepared.planned:
                state.save_complete(out / outputs.LAST, result.rows, joint_best(tasks), self.identity)
        self.prepared.ranks.wait()
        return self._result(result.images_per_second, stopped=result.stopped)

    def _result(self, images_per_second: float, *, stopped: bool) -> JointResult:
        memory = self.prepared.settled.memory
        results = {name: task.result(images_per_second, memory, stopped=stopped) for name, task in self.tasks.items()}
        return JointResult(self.out, results, images_per_second)

    def _describe_change(self) -> str:
        """Describe the difference between the images of the first task that has others now and those it began with."""
        texts = {name: describe_change(task.plan.out, task.task.audit) for name, task in self.tasks.items()}
        return next((f"task `{name}`: {text}" for name, text in texts.items() if text), "")

    def _begin(self) -> None:
        prepared = self.prepared
        if prepared.config.overwrite:  # the earlier run's state, too: it must not outlive that run's packs
            outputs.clear_run(self.out)
        outputs.sweep(self.out)
        for name, task in self.tasks.items():
            console.say(f"{name}: {task.task.audit.root}", style="bold")
            task.plan.out.mkdir(exist_ok=True)
            task.begin()
        shared = count_shared(task.task.model for task in self.tasks.values())
        console.say(
            f"{len(self.tasks)} tasks share {shared:,} frozen weights; a step holds up to "
            f"{prepared.settled.memory.batch} images of each"
        )
        console.say(prepared.settled.memory.line)
        if prepared.settled.step_rule is not None:
            console.say(prepared.settled.rule_line)
        write_text(self.out / "config.yaml", config_text(prepared.config))

    def _fit(self) -> FitResult:
        try:
            return fit_prepared(
                self.prepared, self.out, self.saved, self.callbacks, on_epoch=self._epoch, save=self._save,
                enough=self._out_of_patience,
            )  # fmt: skip
        except DivergedError as error:
            kept = [task for task in self.tasks.values() if task.history.best]
            if not kept:
                raise
            if self.prepared.ranks.main:
                for task in kept:
                    task.draw()
            raise DivergedError(f"{error}; the best packs so far are kept in {self.out}") from error

    def _out_of_patience(self) -> bool:
        """Whether every task is: until then all go on, and each keeps its own best epoch."""
        return all(task.history.out_of_patience() for task in self.tasks.values())

    def _epoch(self, end: EpochEnd) -> Mapping[str, float]:
        """Evaluate every task, and write the state that a resumed run continues from."""
        numbers: dict[str, float] = {}
        with end.averaged():
            for name, task in self.tasks.items():
                row = {key: end.row[key] for key in ("epoch", "seconds", "images_per_second")}
                own = {key: f"{key} {name}" for key in ("loss", "lr", "perturbed_loss")}
                row |= {key: end.row[column] for key, column in own.items() if column in end.row}
                numbers |= {f"{key} {name}": value for key, value in task.score(row).items()}
        if self.prepared.ranks.main:
            self._write_state(end.state(numbers), end.epoch)
            for callbacks in (*(task.callbacks for task in self.tasks.values()), self.callbacks):
                callbacks.flush()
        return numbers

    def _save(self, fit_state: FitState, epoch: int) -> None:
        self._write_state(fit_state, epoch)
        self.callbacks.flush()

    def _write_state(self, fit_state: FitState, epoch: int) -> None:
        last = self.out / outputs.LAST
        state.save_state(last, joint_state(self.tasks, fit_state, self.identity))
        self.callbacks.save("state", last, epoch)


@contextlib.contextmanager
def open_joint_run(
    config: RunConfig, writer: type[Writer], *, callbacks: Sequence[Callback] = ()
) -> Iterator[JointRun]:  # fmt: skip
    """Return a context with a prepared run of several tasks, inside of which nobody else writes to its folders.

    Args:
        config: options of the run, with ``tasks``.
        writer: class of the writer of a task's files.
        callbacks: called in the main process; ``on_end`` with the end of the context.

    Raises:
        UsageError: options that are wrong, or tasks that cannot share their frozen weights.
        DataError: images, weights or an output folder that cannot be used.
        UnavailableError: a device or a package that is missing.
    """
    out, ranks, tasks = joint_folder(config), open_ranks(config.device), dict[str, TaskRun]()
    called, command = main_callbacks(callbacks, ranks), command_line(config)
    folders = [out / spec.name for spec in parse_tasks(config.tasks)]
    with contextlib.ExitStack() as locks:
        locks.enter_context(outputs.hold_run([out], command, main=ranks.main))
        try:
            saved = load_saved(config, out)
            if ranks.main:
                # what is refused now leaves no folders of tasks behind
                for folder in (out, *(folder for folder in folders if folder.exists())):
                    outputs.check_run(folder, overwrite=config.overwrite, resume=config.resume)
            locks.enter_context(outputs.hold_run(folders, command, main=ranks.main))  # each is a run's, too
            prepared = prepare_joint(config, out, ranks, saved)
            for name, part in prepared.tasks.items():
                own = Callbacks(called.user, control=called.control, task=name)
                tasks[name] = TaskRun(part, writer, prepared.planned, own)
            yield JointRun(prepared, out, tasks, saved, called)
        finally:
            for task in tasks.values():
                Callbacks(own=task.callbacks.own).end()
            called.end()
