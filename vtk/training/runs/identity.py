"""The identity of a run: the flags, base weights and images that a resumed run must share with the one it continues."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vtk import console
from vtk.card import InitName
from vtk.data.audit.result import DataAudit
from vtk.data.decoding.rules import V0_1, Decoding
from vtk.data.record import name_below
from vtk.errors import DataError, UsageError
from vtk.training.run_config import RunConfig
from vtk.training.runs.image_list import images_digest
from vtk.training.runs.resume_state import RESTART, Saved

# flags that say where and how long to work, not what the result is; `weights` is compared by the id of the base
_FREE = frozenset(
    "data out weights workers stop_after resume overwrite attn_only device dry_run init_from patience track "
    "recipe save_every on_leak cuda_graph pack_rank".split()
)

_FIRST = {"memory": "plain", "metric": "top1", "init": "0.1"}
"""Values of the runs that knew no such flag, where these are not today's defaults."""


def run_identity(config: RunConfig, *, base_id: str, audit: DataAudit, precision: str, world: int) -> dict[str, Any]:
    """Return everything that a resumed run must share with the one it continues, as JSON values."""
    flags = {k: v for k, v in dataclasses.asdict(config).items() if k not in _FREE}
    flags |= {"precision": precision, "metric": config.chosen_metric, "memory": config.memory}
    flags["cb_layers"] = config.context_layers  # older runs have them in place of a default
    if config.command != "finetune":  # what runs of older versions are
        flags["command"] = config.command
    if audit.decoding.rules != "v0.1":
        flags["decoding"] = audit.decoding.rules
    digest = hashlib.sha256()
    for sample in audit.train:
        label: Any = sample.label  # an array of zeros and ones where an image may have several
        text = label if isinstance(label, int) else ";".join(map(str, label.nonzero()[0]))
        digest.update(f"{name_below(audit, sample.path)}\0{text}\n".encode("utf-8", "surrogateescape"))
    return {
        "flags": _plain(flags), "base": base_id, "data": digest.hexdigest(), "processes": world,
        "images": images_digest(audit),
    }  # fmt: skip


def decoding_of(saved: Saved | None) -> Decoding | None:
    """Return the decoding of a resumed run of version 0.1; None for today's decoding."""
    return None if saved is None or "decoding" in saved.identity["flags"] else V0_1


def init_of(saved: Saved | None) -> InitName | None:
    """Return the initial weights of a resumed run that knew no ``--init``; None for those of the options."""
    return None if saved is None or "init" in saved.identity["flags"] else "0.1"


def check_identity(
    saved: Mapping[str, Any], now: Mapping[str, Any], kind: type[RunConfig], *,
    change: Callable[[], str] | None = None,
) -> None:  # fmt: skip
    """Refuse to continue a run with other flags, another base or other images.

    Args:
        saved: identity of the run so far.
        now: identity of the run that is to continue it.
        kind: class of its config.
        change: describes which images differ.

    Raises:
        UsageError: names each flag with both values.
        DataError: the base or the images differ.
    """
    # a run of an older version lacks the newer flags, and ran with their defaults
    # (None: of a run of several tasks, where each task may have its own)
    was, command = (found["flags"].get("command", "finetune") for found in (saved, now))
    if was != command:
        raise UsageError(
            f"`--resume`: this is a run of `vtk {was}`, not of `vtk {command}`; resume it with `vtk {was}`"
        )
    fields = {f.name: _plain(f.default) for f in dataclasses.fields(kind)}
    defaults = {name: fields[name] for name, value in now["flags"].items() if name in fields and value is not None}
    before, after = {**defaults, **_FIRST, **kind.upgrade(saved["flags"])}, now["flags"]
    changed = [k for k in sorted(before.keys() | after.keys()) if before.get(k) != after.get(k)]
    if "act8" not in (before["memory"], after["memory"]):  # the other modes give the same gradients
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
            f"`--resume`: the run started from base {saved['base'][:12]}, these weights are {now['base'][:12]}; "
            "give those of the run"
        )
    # version 0.1 kept no digests of contents: only names and labels are compared
    if saved["data"] != now["data"] or (saved.get("images") and saved["images"] != now["images"]):
        reason = (change() if change else "") or "the images or their labels are not those the run started with"
        raise DataError(f"`--resume`: {reason}; undo the change, or {RESTART}")
    if not saved.get("images"):
        console.say(
            "the state was saved by version 0.1, which kept no digests of images: changed contents are not detected"
        )


def _plain(value: Any) -> Any:
    """Return the value as JSON would return it, so that saved and current values compare equal."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value
