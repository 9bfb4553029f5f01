"""Writes an export's files to a temporary folder, and publishes them as a set by renaming."""

import contextlib
import json
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import onnx
import psutil
from onnx.external_data_helper import convert_model_to_external_data, write_external_data_tensors

from vtk.card import Card
from vtk.errors import DataError
from vtk.files import as_data_error, remove_tree, temporary
from vtk.filesets import publish, recover
from vtk.formats import write_json
from vtk.locks import hold_folder
from vtk.marks import Marks, any_of, beside, find_own, json_with, others, png, tail_says
from vtk.nodes import HIDDEN
from vtk.runtime import weight_digests as digests
from vtk.runtime.export_facts import PLAIN, Facts
from vtk_export.graph.rename import rename_ends
from vtk_export.readme import IS_OURS, README

INLINE_LIMIT = 1_800_000_000
"""Bytes of weights above which they go to ``model.onnx.data``: protobuf cannot hold 2 GiB in one message."""

CARD = json_with("model", "input", "classes", "schema")
"""Recogniser of ``model.json``, a card."""

_MEASURED = json_with("source", "kind", "backends", "input_shape")
LATENCY = {"latency.json": _MEASURED, "latency.png": png(("latency.json", _MEASURED))}
"""Files of ``--profile``, which a new model removes, and their recognisers."""

# the last fields of the graph's file: the entry of its metadata that has a card, those of many tasks, or the layout of
# factors
GRAPH = any_of(
    *(tail_says(key, b'"classes"') for key in (b"\x0a\x03vtk\x12", b"\x0a\x09vtk.tasks\x12")),
    tail_says(b"\x0a\x0bvtk.factors\x12", b'"layout"'),
)
"""Recogniser of an exported ONNX file."""

DATA = "model.onnx.data"

MARKS = {
    "model.onnx": GRAPH, DATA: beside("model.onnx", GRAPH), "model.json": CARD, README: IS_OURS, **LATENCY,
}  # fmt: skip
"""All files of an export and their recognisers."""

FILES = tuple(MARKS)
_TMP = ".export-tmp-"
"""Temporary folders of version 0.1."""


@contextlib.contextmanager
def workspace(
    out: Path, *, overwrite: bool, command: str, marks: Marks = MARKS, left: Collection[str] = ()
) -> Iterator[Path]:
    """Yield a temporary folder inside ``out``, whose files are published by renaming; other exports are locked out.

    Args:
        out: the export's folder.
        overwrite: accept a folder with other files.
        command: the one that writes there.
        marks: names of files of an earlier export, and their recognisers.
        left: further names that are accepted.

    Raises:
        DataError: ``out`` is a file or a device, holds other files, is being written, or cannot be written.
    """
    with hold_folder(out, command):
        recover(out)
        sweep(out)
        check_names(out, marks, overwrite=overwrite, command=command, left=left)
        folder = out / temporary(f"{HIDDEN}set")
        try:
            folder.mkdir()
        except OSError as error:
            raise DataError(f"cannot write {out}: {error.strerror or error}; choose another folder") from error
        try:
            yield folder
        finally:
            remove_tree(folder)


def check_names(out: Path, marks: Marks, *, overwrite: bool, command: str, left: Collection[str] = ()) -> None:
    """Refuse a folder with files that are not from an export.

    Raises:
        DataError: names one; with ``overwrite`` only if it would be replaced.
    """
    more = [name for name in others(out, marks) if name not in left]
    if more and not overwrite:
        raise DataError(
            f"`--out` {out} holds files that are not from an export ({more[0]}); give another folder, or --overwrite"
        )
    find_own(out, marks, command)


def move(folder: Path, out: Path, *, command: str, marks: Marks = MARKS, kept: Collection[str] = ()) -> None:
    """Publish the new files in place of those of an earlier export, all of them or none."""
    with as_data_error(out):
        publish(folder, out, marks, command, kept)


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
    """Write ``model.onnx`` with the names of ``facts``; ``proto`` loses large weights: do not use it again."""
    path = folder / "model.onnx"
    rename_ends(proto, facts.names)
    proto.ClearField("metadata_props")
    onnx.helper.set_model_props(proto, {"vtk": card.to_json(), **facts.props()})
    weights = sum(len(tensor.raw_data) for tensor in proto.graph.initializer)
    try:
        if weights > INLINE_LIMIT:
            convert_model_to_external_data(proto, all_tensors_to_one_file=True, location=DATA)
            proto = write_external_data_tensors(proto, str(folder))
        digests.stamp(proto, folder)
        onnx.save_model(proto, path)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}; free some space") from error
    return path


def restamp(path: Path, card: Card, facts: Facts) -> None:
    """Write new facts into an existing file; external weights are not touched."""
    proto = onnx.load(path, load_external_data=False)
    proto.ClearField("metadata_props")
    onnx.helper.set_model_props(proto, {"vtk": card.to_json(), **facts.props()})
    digests.stamp(proto, path.parent)
    onnx.save_model(proto, path)
