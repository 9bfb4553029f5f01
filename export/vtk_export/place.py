"""Where an export's files are made and how they reach their place: by renaming, never half new, nothing stale."""

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import onnx
import psutil

from vtk.card import Card
from vtk.errors import DataError
from vtk.files import replace_file
from vtk.formats import write_json
from vtk.runtime.facts import PLAIN, Facts

INLINE_LIMIT = 1_800_000_000
"""Bytes of weights above which they go to ``model.onnx.data``: protobuf cannot hold 2 GiB in one message."""

LATENCY = ("latency.json", "latency.png")
"""What ``--profile`` leaves beside a model: of that file, so a new one takes them away."""

FILES = ("model.onnx", "model.onnx.data", "model.json", *LATENCY)
"""Everything an export can leave in its folder."""

_TMP = ".export-tmp-"


@contextlib.contextmanager
def workspace(out: Path, *, overwrite: bool, known: Collection[str] = FILES) -> Iterator[Path]:
    """Yield a temporary folder inside ``out``, so that its files reach their place by renaming.

    Args:
        out: the export's folder.
        overwrite: let it hold other files too.
        known: names that an earlier export may have left there.

    Raises:
        DataError: ``out`` is a file, holds other files, or cannot be written.
    """
    if out.exists() and not out.is_dir():
        raise DataError(f"`--out` {out} is a file; give a folder")
    existed = out.is_dir()
    others = [p.name for p in out.iterdir() if p.name not in known and not p.name.startswith(_TMP)] if existed else []
    if others and not overwrite:
        raise DataError(f"`--out` {out} holds files that no export wrote ({min(others)}); give another, or --overwrite")
    folder = out / f"{_TMP}{os.getpid()}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror or error}; choose another folder") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):
                out.rmdir()  # only if nothing was put there


def move(folder: Path, out: Path) -> None:
    """Put the new files in place of those of an earlier export; ``model.onnx`` comes last, so it is never half new."""
    if (folder / "model.onnx.data").exists() or (out / "model.onnx.data").exists():
        (out / "model.onnx").unlink(missing_ok=True)
        (out / "model.onnx.data").unlink(missing_ok=True)
    for name in LATENCY:
        (out / name).unlink(missing_ok=True)
    for name in ("model.onnx.data", "model.json", "model.onnx"):
        if (folder / name).exists():
            with replace_file(out / name) as tmp:
                os.replace(folder / name, tmp)
    sweep(out)


def sweep(out: Path) -> None:
    """Delete the temporary folders of exports that were killed."""
    for left in out.glob(f"{_TMP}*"):
        pid = left.name.removeprefix(_TMP)
        if not (pid.isdecimal() and psutil.pid_exists(int(pid))):
            shutil.rmtree(left, ignore_errors=True)  # of an export that was killed


def write(proto: onnx.ModelProto, card: Card, folder: Path, facts: Facts = PLAIN) -> Path:
    """Write ``model.onnx``, with its weights inside below `INLINE_LIMIT`, and ``model.json``; return the first."""
    path = save(proto, card, folder, facts)
    write_json(folder / "model.json", json.loads(card.to_json()))
    return path


def save(proto: onnx.ModelProto, card: Card, folder: Path, facts: Facts = PLAIN) -> Path:
    """Write ``model.onnx``; large weights leave ``proto``, which is of no use afterwards."""
    path = folder / "model.onnx"
    proto.ClearField("metadata_props")
    onnx.helper.set_model_props(proto, {"vtk": card.to_json(), **facts.props()})
    weights = sum(len(tensor.raw_data) for tensor in proto.graph.initializer)
    external = weights > INLINE_LIMIT
    try:
        onnx.save_model(
            proto, path, save_as_external_data=external, location="model.onnx.data", all_tensors_to_one_file=True
        )
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}; free some space") from error
    return path


def restamp(path: Path, card: Card, facts: Facts) -> None:
    """Write other facts into a file that is there already; weights beside it stay where they are."""
    proto = onnx.load(path, load_external_data=False)
    proto.ClearField("metadata_props")
    onnx.helper.set_model_props(proto, {"vtk": card.to_json(), **facts.props()})
    onnx.save_model(proto, path)
