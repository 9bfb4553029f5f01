"""``RUN/last``: what a stopped run needs to go on as if it had not been stopped. No pickle is ever trusted.

``model.safetensors`` holds the trained tensors (fp32 masters) and the buffers that training changes, ``state.pt`` the
optimiser and schedule (read with ``weights_only=True``), ``state.json`` the flags, the metrics so far and the ids of
the base and of the data. The folder is replaced as a whole after each epoch and, where that is asked for, within one:
then ``state.pt`` has what each process has of the epoch, too. Nothing goes on from a run that has done all it was to
do, so of that one only the numbers stay.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vtk import console
from vtk.card import from_plain
from vtk.data.audit.result import DataAudit
from vtk.data.decoding.rules import V0_1, Decoding
from vtk.data.record import name_below
from vtk.errors import DataError, UsageError
from vtk.files import existing_dir, replace_dir
from vtk.filesets import is_empty
from vtk.formats import read_json, save_tensors, write_json
from vtk.models.weights.files import read_safetensors
from vtk.readers import reading
from vtk.training.engine.result import FitState
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.runs.image_list import images_digest
from vtk.training.train_config import RunConfig

SCHEMA = 2
"""1 is the state after an epoch, which older versions read; 2 is one within an epoch, or of a finished run."""
MODEL, STATE, INFO = "model.safetensors", "state.pt", "state.json"

_RESTART = "give --overwrite in place of --resume to restart"

# flags that say where and how long to work, not what the result is; `weights` is compared by the id of the base
_FREE = frozenset(
    "data out weights workers stop_after resume overwrite attn_only device dry_run init_from patience track "
    "recipe save_every on_leak cuda_graph".split()
)


@dataclass(frozen=True)
class Saved:
    """Contents of ``RUN/last``.

    Attributes:
        tensors: trained tensors and live buffers.
        fit: state of the engine.
        best: the best epoch so far: ``epoch``, the metrics, and ``confusion`` as a tensor.
        identity: what must be the same on resume (`identity`).
        complete: whether the run has done all it was to do; then there are no tensors and no optimiser.
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


def identity(config: RunConfig, *, base_id: str, audit: DataAudit, precision: str, world: int) -> dict[str, Any]:
    """Return everything that a resumed run must share with the one it continues, as JSON values."""
    flags = {k: v for k, v in dataclasses.asdict(config).items() if k not in _FREE}
    flags |= {"precision": precision, "metric": config.chosen_metric, "memory": config.memory}
    if config.command != "finetune":  # what runs of older versions are
        flags["command"] = config.command
    if audit.decoding.rules != "v0.1":
        flags["decoding"] = audit.decoding.rules
    digest = hashlib.sha256()
    for sample in audit.train:
        label: Any = sample.label  # an array of zeros and ones where an image may have several
        told = label if isinstance(label, int) else ";".join(map(str, label.nonzero()[0]))
        digest.update(f"{name_below(audit, sample.path)}\0{told}\n".encode("utf-8", "surrogateescape"))
    return {
        "flags": _plain(flags), "base": base_id, "data": digest.hexdigest(), "processes": world,
        "images": images_digest(audit),
    }  # fmt: skip


def decoding_of(saved: Saved | None) -> Decoding | None:
    """Return how a resumed run decodes its images where that is not today's way: as version 0.1 began it."""
    return None if saved is None or "decoding" in saved.identity["flags"] else V0_1


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
    """Replace the state of a run that has done all it was to do by its numbers: nothing goes on from it.

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
        raise DataError(f"{error}; {_RESTART}") from error


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
        _check_best(best)
    ident = {k: info[k] for k in ("flags", "base", "data", "processes")} | {"images": known.images}
    return Saved(tensors, fit, best, ident, known.complete)


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
            _check_best(best)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"`--resume`: the saved state of task `{name}` is damaged ({type(error).__name__}: {error}); give "
            "--overwrite in place of --resume to restart"
        ) from error
    tensors = {k.partition("/")[2]: v for k, v in saved.tensors.items() if k.partition("/")[0] == name}
    return Saved(tensors, fit, best, saved.identity)


def _check_best(best: Mapping[str, Any]) -> None:
    """Raise a KeyError where the numbers of the best epoch lack one that `label_kinds.recall` needs."""
    needed = {"epoch", "count", "loss", "confusion"} | (set() if "mAP" in best else {"top1", "top5"})
    if lacking := sorted(needed - best.keys(), reverse=True):
        raise KeyError(lacking[0])


def check_identity(
    saved: Mapping[str, Any], now: Mapping[str, Any], kind: type[RunConfig] = FinetuneConfig, *,
    change: Callable[[], str] | None = None,
) -> None:  # fmt: skip
    """Refuse to continue a run with other flags, another base or other images.

    Args:
        saved: of the run so far.
        now: of what is to go on with it.
        kind: of config that it has.
        change: says which images are others.

    Raises:
        UsageError: names each flag with both values.
        DataError: the base or the images are others.
    """
    # a run of an older version does not have the newer flags; it did what their defaults do
    # (None: of a run of several tasks, where each task may have its own)
    was, command = (found["flags"].get("command", "finetune") for found in (saved, now))
    if was != command:
        raise UsageError(f"`--resume`: this is a run of `vtk {was}`, not of `vtk {command}`; continue it with that")
    fields = {f.name: _plain(f.default) for f in dataclasses.fields(kind)}
    defaults = {name: fields[name] for name, value in now["flags"].items() if name in fields and value is not None}
    before, after = {**defaults, "memory": "plain", "metric": "top1", **kind.upgrade(saved["flags"])}, now["flags"]
    changed = [k for k in sorted(before.keys() | after.keys()) if before.get(k) != after.get(k)]
    if "gelu8" not in (before["memory"], after["memory"]):  # the other modes give the same gradients
        changed = [k for k in changed if k != "memory"]
    if changed:
        lines = ", ".join(f"--{k.replace('_', '-')} {after.get(k)} (was {before.get(k)})" for k in changed)
        raise UsageError(
            f"`--resume` continues with the run's own flags, but these differ: {lines}; repeat them, or "
            "give --config with the run's config.yaml"
        )
    if saved["processes"] != now["processes"]:
        raise UsageError(
            f"`--resume`: the run had {saved['processes']} processes, this one has {now['processes']}; use as many"
        )
    if saved["base"] != now["base"]:
        raise DataError(
            f"`--resume`: the run started from base {saved['base'][:12]}, these weights are {now['base'][:12]}"
        )
    # a run of version 0.1 did not note contents: of it only names and labels are compared
    if saved["data"] != now["data"] or (saved.get("images") and saved["images"] != now["images"]):
        told = (change() if change else "") or "the images or their labels are not those the run started with"
        raise DataError(f"`--resume`: {told}; take the change back, or {_RESTART}")
    if not saved.get("images"):
        console.say("the run's state is of version 0.1: whether its images have the content they had is not known")


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


def _plain(value: Any) -> Any:
    """Return what JSON would give back, so that saved and present values compare equal."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value
