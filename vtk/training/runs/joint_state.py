"""The saved state of several tasks in one: tensors, numbers and identity of each, under its name."""

import hashlib
from collections.abc import Mapping
from typing import Any

from vtk.errors import DataError
from vtk.training.engine.result import FitState
from vtk.training.runs.prepare import PreparedRun
from vtk.training.runs.resume_state import Saved, check_best
from vtk.training.runs.task_run import TaskRun


def joint_identity(prepared: PreparedRun) -> dict[str, Any]:
    """Return what a resumed run of several tasks must share with the one it continues."""
    tasks = prepared.tasks
    each = [part.identity() for part in tasks.values()]
    joined = {key: "\n".join(values[key] for values in each) for key in ("data", "images")}
    joined = {key: "\n".join(values[key] for values in each) for key in ("data", "images")}
    digests = {key: hashlib.sha256(text.encode()).hexdigest() for key, text in joined.items()}
    sizes = ["{}@{}x{}".format(name, *part.task.image_size[1:]) for name, part in tasks.items()]
    hflip = [values["flags"]["hflip"] for values in each]
    # sizes and folders are each task's own
    flags = {**each[0]["flags"], "img_size": None, "tasks": sizes, "sampling": prepared.config.sampling,
             "hflip": hflip[0] if len(set(hflip)) == 1 else hflip}  # fmt: skip
    return {**each[0], **digests, "flags": flags}


def joint_best(tasks: Mapping[str, TaskRun]) -> dict[str, Any]:
    """Return what is kept of each task's best epoch, and the numbers of all epochs."""
    histories = {name: task.history for name, task in tasks.items()}
    return {
        "tasks": {name: history.best_numbers for name, history in histories.items()},
        "rows": {name: history.rows for name, history in histories.items()},
        "confusion": {name: history.best["confusion"] for name, history in histories.items() if history.best},
    }


def joint_state(tasks: Mapping[str, TaskRun], fit: FitState, identity: dict[str, Any]) -> Saved:
    """Return the state of a run of several tasks."""
    tensors = {f"{name}/{key}": value for name, task in tasks.items() for key, value in task.live_state().items()}
    return Saved(tensors, fit, joint_best(tasks), identity)


def of_task(saved: Saved, name: str) -> Saved:
    """Return the part of one task of a run of several.

    Raises:
        DataError: it is not there, as in a file that was edited.
    """
    try:
        best = dict(saved.best["tasks"][name])
        rows = [dict(row) for row in saved.best["rows"][name]]
        fit = FitState(saved.fit.epoch, {}, {}, rows)
        if not saved.complete:
            fit = FitState(saved.fit.epoch, saved.fit.optimizer[name], saved.fit.schedule[name], rows)
        if saved.fit.epoch:
            best["confusion"] = saved.best["confusion"][name]
            check_best(best)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"`--resume`: the saved state of task `{name}` is damaged ({type(error).__name__}: {error}); give "
            "--overwrite in place of --resume to restart"
        ) from error
    tensors = {k.partition("/")[2]: v for k, v in saved.tensors.items() if k.partition("/")[0] == name}
    return Saved(tensors, fit, best, saved.identity)
