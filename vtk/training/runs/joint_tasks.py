"""Prepares a run of several tasks: each has its images and its trained weights, all share the frozen ones."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vtk.errors import UsageError
from vtk.training.engine.processes import Ranks
from vtk.training.engine.step_plan import plan_joint, planned_epochs
from vtk.training.engine.streams import SampledStream, Stream, batch_counts
from vtk.training.objectives.base import JointObjective
from vtk.training.options.task_spec import parse_starts, parse_tasks
from vtk.training.run_config import RunConfig
from vtk.training.runs.command_line import command_line
from vtk.training.runs.identity import decoding_of, init_of
from vtk.training.runs.joint_model import JointModel, JointPrecision, share_frozen
from vtk.training.runs.plan import RunPlan, plan_run
from vtk.training.runs.prepare import PreparedRun, prepare_task, settle
from vtk.training.runs.resume_state import Saved
from vtk.training.runs.scoring import default_workers
from vtk.training.runs.task import Task, build_task


def joint_folder(config: RunConfig) -> Path:
    """Return the folder of a run of several tasks.

    Raises:
        UsageError: there are none.
    """
    if not config.tasks:
        raise UsageError("no tasks: give two or more as NAME=FOLDER")
    names = "+".join(spec.name for spec in parse_tasks(config.tasks))
    return config.out or Path("runs") / names[:100]


def build_tasks(config: RunConfig, out: Path, ranks: Ranks, saved: Saved | None = None) -> dict[str, Task]:
    """Read every task's images and make its model on the frozen tensors of the first.

    Args:
        config: options of the run, with ``tasks``.
        out: folder of the run; each task has a folder in it.
        ranks: this process and the others.
        saved: state of the run that is resumed.

    Raises:
        UsageError: options that are wrong, tasks that cannot share their frozen weights, or fewer images of one than
            processes.
        DataError: images or weights that cannot be used.
    """
    plans = _plan(config, out, ranks)
    # one number where all tasks had the same
    before = saved.identity["flags"].get("hflip") if saved is not None else None
    tasks: dict[str, Task] = {}
    first: Task | None = None
    for number, (name, plan) in enumerate(plans.items()):
        hflip = before[number] if isinstance(before, list) else before
        base = None if first is None else first.created.base
        task = tasks[name] = build_task(plan, decoding=decoding_of(saved), hflip=hflip, base=base, init=init_of(saved))
        if (images := len(task.audit.train)) < ranks.world:  # no batch has one for each process
            raise UsageError(
                f"task `{name}` has {images} training images for {ranks.world} processes; start at most {images}"
            )
        if first is None:
            first = task
        else:
            share_frozen(name, task.model, first.model)
    return tasks


def _plan(config: RunConfig, out: Path, ranks: Ranks) -> dict[str, RunPlan]:
    """Return the plan of each task, so that what can be refused is refused before any image is read."""
    specs = parse_tasks(config.tasks)
    starts = parse_starts(config.init_from, [spec.name for spec in specs])
    command, plans = command_line(config), {}
    for spec in specs:
        changes: dict[str, Any] = {
            "data": spec.data, "tasks": (), "sampling": 1.0, "resume": False, "out": None,
            "img_size": config.img_size if spec.size is None else spec.size,
            "init_from": (str(starts[spec.name]),) if spec.name in starts else (),
        }  # fmt: skip
        own = dataclasses.replace(config, **changes)
        try:
            plans[spec.name] = plan_run(own, out / spec.name, ranks, title=f"{spec.name}: ", command=command)
        except UsageError as error:
            raise UsageError(f"task `{spec.name}`: {error}") from error
    return plans


def prepare_joint(config: RunConfig, out: Path, ranks: Ranks, saved: Saved | None = None) -> PreparedRun:
    """Prepare a run of several tasks; see `build_tasks` for the arguments and errors."""
    tasks = build_tasks(config, out, ranks, saved)
    model = JointModel({name: task.model for name, task in tasks.items()})
    settled = settle(list(tasks.values()), config, ranks, saved)
    config = settled.config
    workers = default_workers(config.workers, ranks.world * len(tasks))
    prepared = {name: prepare_task(task, settled.memory, workers) for name, task in tasks.items()}
    streams = _sample([part.stream for part in prepared.values()], config.sampling)
    steps = len(plan_joint([stream.sizes for stream in streams], config.accumulate, 0))
    return PreparedRun(
        prepared, model, JointObjective([part.labelled for part in prepared.values()]), streams, config,
        JointPrecision([(task.model, task.plan.precision) for task in tasks.values()]), ranks, settled,
        planned_epochs(config.epochs, steps, config.max_steps), {name: task.model for name, task in tasks.items()},
    )  # fmt: skip


def _sample(streams: Sequence[Stream], temperature: float) -> list[Stream]:
    """Return each task's batches, as many in an epoch as ``--sampling`` asks for."""
    sampled = list(streams)
    for i, batches in enumerate(batch_counts([stream.sizes for stream in streams], temperature)):
        if batches is not None:
            sampled[i] = SampledStream(sampled[i], batches)
    return sampled
