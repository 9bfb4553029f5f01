"""``RUN/last``: the state from which a stopped run continues exactly. No pickle is ever trusted.

``model.safetensors`` holds the trained tensors (fp32 masters) and the buffers that training changes, ``state.pt`` the
optimizer and schedule (read with ``weights_only=True``), ``state.json`` the flags, the metrics so far and the ids of
the base and of the data. The folder is replaced as a whole after each epoch and, where that is asked for, within one:
then ``state.pt`` has what each process has of the epoch, too. Nothing goes on from a run that has done all it was to
do, so of that one only the numbers stay.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vtk.card import from_plain
from vtk.errors import DataError
from vtk.files import existing_dir, replace_dir
from vtk.filesets import is_empty
from vtk.formats import read_json, save_tensors, write_json
from vtk.models.weights.files import read_safetensors
from vtk.readers import reading
from vtk.training.engine.result import FitState

SCHEMA = 2
"""1 is the state after an epoch, which older versions read; 2 is one within an epoch, or of a complete run."""
MODEL, STATE, INFO = "model.safetensors", "state.pt", "state.json"

RESTART = "give --overwrite in place of --resume to restart"


@dataclass(frozen=True)
class Saved:
    """Contents of ``RUN/last``.

    Attributes:
        tensors: trained tensors and live buffers.
        fit: state of the engine.
        best: the best epoch so far: ``epoch``, the metrics, and ``confusion`` as a tensor.
        identity: what must be the same on resume (`vtk.training.runs.identity`).
        complete: whether the run has done all it was to do; then there are no tensors and no optimizer.
    """

    tensors: dict[str, Tensor]
    fit: FitState
    best: dict[str, Any]
    identity: dict[str, Any]
    complete: bool = False


@dataclass(frozen=True)
class _Info:
    """``state.json``."""

    schema: int
    epoch: int
    rows: tuple[dict[str, Any], ...]
    best: dict[str, Any]
    flags: dict[str, Any]
    base: str
    data: str
    processes: int
    images: str = ""
    step: int = 0
    complete: bool = False


def save_state(path: Path, saved: Saved) -> None:
    """Replace ``path`` by ``saved``, whole or not at all.

    Raises:
        DataError: the folder cannot be written.
    """
    confusion = saved.best.get("confusion")
    state = {
        "optimizer": saved.fit.optimizer, "schedule": saved.fit.schedule, "scaler": saved.fit.scaler,
        "ema": saved.fit.ema, "confusion": confusion,
    }  # fmt: skip
    newer: dict[str, Any] = {}
    if saved.fit.step:
        state["parts"], newer["step"] = saved.fit.parts, saved.fit.step
    if saved.complete:
        state, newer["complete"] = {"confusion": confusion}, True
    info = {
        "schema": SCHEMA if newer else 1,
        "epoch": saved.fit.epoch,
        **newer,
        "rows": saved.fit.rows,
        "best": {k: v for k, v in saved.best.items() if k != "confusion"},
        **saved.identity,
    }
    with replace_dir(path) as tmp:
        if not saved.complete:
            save_tensors(tmp / MODEL, saved.tensors)
        torch.save(state, tmp / STATE)
        write_json(tmp / INFO, info)


def save_complete(path: Path, rows: list[dict[str, float]], best: dict[str, Any], identity: dict[str, Any]) -> None:
    """Replace the state of a complete run by its numbers: nothing is left to resume.

    Args:
        path: ``RUN/last``.
        rows: numbers of every epoch.
        best: and
        identity: as in `Saved`.
    """
    save_state(path, Saved({}, FitState(len(rows), {}, {}, rows), best, identity, complete=True))


def load_state(path: Path) -> Saved:
    """Read what `save_state` wrote.

    Raises:
        DataError: nothing to resume, a damaged file, or one written by a newer version.
    """
    folder = existing_dir(path)
    if not (folder / INFO).is_file():
        begun = path.parent.is_dir() and not is_empty(path.parent)
        how = "give --overwrite in place of --resume" if begun else "leave out --resume"
        raise DataError(f"`--resume`: {path} holds no state of a run, so no epoch was finished; {how} to start one")
    try:
        with reading(folder, "is damaged", "nothing can go on from it"):
            return _read_state(folder)
    except DataError as error:
        raise DataError(f"{error}; {RESTART}") from error


def _read_state(folder: Path) -> Saved:
    info = read_json(folder / INFO)
    if not isinstance(info, dict) or not isinstance(info.get("schema"), int):
        raise DataError(f"{folder / INFO} is not the state of a run")
    if info["schema"] > SCHEMA:
        raise DataError(
            f"{folder / INFO} was written by a newer vtk (schema {info['schema']}), which can go on with it"
        )
    known = from_plain(_Info, info, str(folder / INFO))
    tensors = {} if known.complete else read_safetensors(folder / MODEL)[0]
    if not (folder / STATE).is_file():
        raise DataError(f"there is no file {folder / STATE}")
    try:
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds; torch's own words advise to run what the file holds
        raise DataError(f"{folder / STATE} is damaged or holds more than tensors") from error
    if not len(known.rows) == known.epoch <= known.flags["epochs"]:
        raise ValueError(f"{INFO} has {len(known.rows)} rows for {known.epoch} epochs")
    if known.complete:
        state |= {"optimizer": {}, "schedule": {}}
    fit = FitState(
        known.epoch, state["optimizer"], state["schedule"], list(known.rows), state.get("scaler", {}),
        state.get("ema", {}), known.step, state["parts"] if known.step else [],
    )  # fmt: skip
    best = {**known.best, "confusion": state["confusion"]} if known.best else {}  # none yet within the first epoch
    if "tasks" not in best and known.epoch:
        check_best(best)
    ident = {k: info[k] for k in ("flags", "base", "data", "processes")} | {"images": known.images}
    return Saved(tensors, fit, best, ident, known.complete)


def check_best(best: Mapping[str, Any]) -> None:
    """Raise a KeyError where the numbers of the best epoch lack one that `label_kinds.recall` needs."""
    needed = {"epoch", "count", "loss", "confusion"} | (set() if "mAP" in best else {"top1", "top5"})
    if lacking := sorted(needed - best.keys(), reverse=True):
        raise KeyError(lacking[0])


def restore(model: nn.Module, tensors: Mapping[str, Tensor], trained: Iterable[str]) -> None:
    """Copy saved tensors into a model that was created anew.

    Raises:
        DataError: a tensor does not fit, or one of ``trained`` is not among them.
    """
    state = model.state_dict()
    if missing := sorted(set(trained) - tensors.keys()):
        raise DataError(f"`--resume`: the saved state has no tensor `{missing[0]}`; start another run")
    for name, value in tensors.items():
        if name not in state or state[name].shape != value.shape:
            raise DataError(f"`--resume`: saved tensor `{name}` does not fit this model; start another run")
    model.load_state_dict(dict(tensors), strict=False)
