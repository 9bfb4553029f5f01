"""Writes a model's folder of factors from that of its last version, where only some tasks are new.

What is new is exported with a few of the others, and verified. If that gives the very graph that the last version has,
files of the other tasks fit it as they are.
"""

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vtk import console
from vtk.errors import DataError, VerificationError
from vtk.formats import read_json, write_json
from vtk.runtime.weight_digests import file_digest
from vtk_export.tasks.factor_layout import CLASSES, COUNTS, rank_axis
from vtk_export.tasks.index import LAYOUT
from vtk_export.triton.bank_packs import AGAIN, PACKS, pack_digest
from vtk_export.triton.publish import link_file

Export = Callable[[Mapping[str, Path], Path], None]
"""Exports packs by name into a folder, and verifies them."""

_BYTES = {"fp32": 4, "fp16": 2}
_CLOSE = 1e-5
_SEED = 0


def update_factors(last: Path, out: Path, packs: Mapping[str, Path], export: Export, *, show: bool = True) -> bool:
    """Write a folder of factors with what the last version has of it.

    Args:
        last: folder of that version.
        out: the folder to write; absent.
        packs: of all tasks, by name.
        export: for the packs that are new.
        show: print what was not exported again.

    Returns:
        Whether it was written; otherwise the tasks need another graph, or the last version is damaged.

    Raises:
        VtkError: what ``export`` raises.
        VerificationError: the folder does not give what the new tasks gave when they were exported.
    """
    earlier, known = _read_known(last, packs)
    if not known:
        return False
    again = list(known)[:AGAIN]
    part = out.with_name("part")
    try:
        export({name: pack for name, pack in packs.items() if name not in known or name in again}, part)
        found = read_json(part / LAYOUT)
        about = [key for key in found if key not in ("tasks", "sizes", "padded_bytes")]
        if any(found[key] != earlier.get(key) for key in about):
            return False
        out.mkdir()
        for name in earlier["sha256"]:
            link_file(last / name, out / name)
        tasks = {}
        for name in packs:
            source, entries = (last, earlier) if name in known else (part, found)
            tasks[name] = entries["tasks"][name]
            link_file(source / tasks[name]["file"], out / tasks[name]["file"])
        sizes = _sizes(found["sizes"], tasks)
        write_json(
            out / LAYOUT, {**found, "tasks": tasks, "sizes": sizes, "padded_bytes": _padded(found, sizes, tasks)}
        )
        _verify(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    if show and (kept := len(known) - len(again)):
        which = "1 task is that" if kept == 1 else f"{kept} tasks are those"
        were = "was" if kept == 1 else "were"
        console.say(f"{which} of the model as it is, and {were} verified then")
    return True


def _read_known(last: Path, packs: Mapping[str, Path]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the layout of a version, and the packs that it has already, bit for bit, with files that are whole."""
    try:
        found = read_json(last / LAYOUT)
        if any(file_digest(last / name) != digest for name, digest in found["sha256"].items()):
            return {}, {}
        known = {}
        for name, pack in packs.items():
            entry, digest = found["tasks"].get(name), pack_digest(last / PACKS / name)
            if (
                entry
                and digest
                and digest == pack_digest(pack)
                and file_digest(last / entry["file"]) == entry["sha256"]
            ):
                known[name] = pack
        return found, known
    except (DataError, OSError, KeyError, TypeError, AttributeError):  # a damaged version: all are exported
        return {}, {}


def _sizes(axes: Mapping[str, int], tasks: Mapping[str, Any]) -> dict[str, int]:
    """Return the size of each open axis: that of the largest task, at least 1."""
    sizes = dict.fromkeys(axes, 1)
    for entry in tasks.values():
        mine = {rank_axis(key.removesuffix(".weight")): rank for key, rank in entry["ranks"].items()}
        for axis, size in {**mine, CLASSES: len(entry["classes"])}.items():
            sizes[axis] = max(sizes[axis], size)
    return sizes


def _padded(layout: Mapping[str, Any], sizes: Mapping[str, int], tasks: Mapping[str, Any]) -> int:
    """Return the bytes by which the stacks exceed the tasks' rows."""
    rows = sum(
        math.prod(sizes[axis] if isinstance(axis, str) else axis for axis in stack["axes"]) * _BYTES[stack["dtype"]]
        for stack in layout["stacks"] if stack["name"] != COUNTS
    )  # fmt: skip
    return rows * len(tasks) - sum(int(entry["bytes"]) for entry in tasks.values())


def _verify(part: Path, out: Path) -> None:
    """Open the folder with all tasks, and compare it with the export of some of them."""
    from vtk_export.triton.served.vtk_factors import FactorModel  # needs onnxruntime

    verified, whole = FactorModel(part, threads=1), FactorModel(out, threads=1)
    pixels = np.random.default_rng(_SEED).standard_normal((1, *whole.shape), dtype=np.float32)
    for name in verified.tasks:
        wanted, found = verified.run({name: pixels})[name], whole.run({name: pixels})[name]
        if found.shape != wanted.shape or not np.abs(found - wanted).max() <= _CLOSE * np.abs(wanted).max():
            raise VerificationError(f"`{name}` has other logits among all tasks than alone; please report this")
