"""Writes digests of the weights into an ONNX file at export, and checks them when the file is opened.

Every parser accepts a file with zeroed or exchanged weights. So an exported file has in its metadata, under `KEY`, the
SHA-256 of the graph, of the weights inside it and of each external file. If another tool has rewritten the graph and
kept the metadata, the graph's digest differs and the weights are not checked.
"""

import functools
import hashlib
import json
import time
import zipfile
from pathlib import Path
from typing import Any

from vtk.errors import DataError
from vtk.formats import parse_json
from vtk.readers import reading
from vtk.runtime.external import external_ends

KEY = "vtk.weights"
"""Name of the property; files of version 0.1 have none and are not checked."""

REWRITTEN = "another tool has changed the graph since its export, so its weights cannot be checked"
"""Note on a file whose graph is not the exported one."""

_AGAIN = "copy it again, or export it again"
_RACY_NS = 50_000_000
"""A file that was changed this recently may change again without a change of its timestamps."""

State = tuple[int, ...]
_checked: dict[str, tuple[list[State], str]] = {}


def stamp(proto: Any, folder: Path) -> None:
    """Write the digests into a model's metadata, in place.

    Args:
        proto: the model; its external files are written already.
        folder: of the external files.
    """
    kept = [entry for entry in proto.metadata_props if entry.key != KEY]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    files = {name: file_digest(folder / name) for name in external_ends(proto, folder)}
    found = {"graph": _graph(proto), "inside": _inside(proto), "files": files}
    proto.metadata_props.add(key=KEY, value=json.dumps(found))


def check(proto: Any, path: Path) -> str:
    """Check a model against the digests in its metadata, once while its files do not change.

    Args:
        proto: the model, read without its external data; `vtk.runtime.onnx_file` has checked these files.
        path: of the model.

    Returns:
        A note: empty, or `REWRITTEN`.

    Raises:
        DataError: its weights are not the exported ones.
    """
    stated = next((entry.value for entry in proto.metadata_props if entry.key == KEY), None)
    if stated is None:
        return ""
    names = list(external_ends(proto, path))
    states = [_state(file) for file in (path, *(path.parent / name for name in names))]
    before = _checked.get(str(path))
    if before is not None and before[0] == states:
        return before[1]
    where = f"{path}: `{KEY}` in its metadata"
    with reading(where, "is not a record of digests", _AGAIN):
        found = parse_json(stated, where)
        graph, inside, files = found["graph"], found["inside"], dict(found["files"])
    remark = ""
    if graph != _graph(proto):
        remark = REWRITTEN
    elif inside != _inside(proto):
        raise DataError(f"{path} is damaged: the weights in it are not those that were exported; {_AGAIN}")
    else:
        for name in names:
            if files.get(name) != file_digest(path.parent / name):
                raise DataError(f"{path.parent / name} is damaged, or of another export: its bytes are not those that "
                                f"{path.name} was written with; {_AGAIN}")  # fmt: skip
    if not any(map(_racy, states)):
        _checked[str(path)] = states, remark
    return remark


def content_digest(path: Path) -> str:
    """Return one digest of an ONNX file and its external files."""
    import onnx

    proto = onnx.load(path, load_external_data=False)
    parts = [file_digest(path), *(f"{name} {file_digest(path.parent / name)}" for name in external_ends(proto, path))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def check_archive(path: Path) -> None:
    """Check the entries of a zip archive, such as a ``.pt2``, against their checksums, which torch's reader does not.

    Raises:
        DataError: an entry is damaged.
    """
    with reading(path, "is not a readable archive", _AGAIN), zipfile.ZipFile(path) as archive:
        wrong = archive.testzip()
    if wrong is not None:
        raise DataError(f"{path} is damaged: the bytes of {wrong} are not those that were written; {_AGAIN}")


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, computed once while the file does not change.

    Raises:
        DataError: it cannot be read.
    """
    state = _state(path)
    return _digest(path) if _racy(state) else _remembered(path, state)


@functools.lru_cache(maxsize=64)
def _remembered(path: Path, state: State) -> str:
    return _digest(path)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; {_AGAIN}") from error


def _state(path: Path) -> State:
    """Return numbers that differ after a file was changed or replaced."""
    try:
        now = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; {_AGAIN}") from error
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns


def _racy(state: State) -> bool:
    return time.time_ns() - max(state[3:]) < _RACY_NS


def _graph(proto: Any) -> str:
    """Return the digest of a graph without the bytes of its weights."""
    digest = hashlib.sha256()
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.node):
        digest.update(value.SerializeToString(deterministic=True) + b"\n")
    for tensor in proto.graph.initializer:
        places = [(entry.key, entry.value) for entry in tensor.external_data]
        digest.update(f"{tensor.name} {tensor.data_type} {list(tensor.dims)} {places}\n".encode())
    return digest.hexdigest()


def _inside(proto: Any) -> str:
    """Return the digest of the weights inside of a file."""
    digest = hashlib.sha256()
    for tensor in proto.graph.initializer:
        if not tensor.external_data:
            digest.update(tensor.raw_data or tensor.SerializeToString(deterministic=True))
    return digest.hexdigest()
