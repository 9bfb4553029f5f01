"""Digests by which weights are known: written into an ONNX file when it is made, held against it when it is opened.

A zeroed or exchanged block of weights leaves a file that every parser takes. So an exported file has in its metadata,
under `KEY`, the SHA-256 of what the graph looks like, of the weights inside it and of each file beside it. Another
tool may write the graph anew and carry the metadata along: its graph is another, and nothing is said of its weights.
"""

import functools
import hashlib
import json
import time
import zipfile
from pathlib import Path
from typing import Any

from vtk.errors import DataError

KEY = "vtk.weights"
"""Name of the property; files of version 0.1 have none and are not checked."""

REWRITTEN = "another tool has changed the graph since its export, so its weights cannot be checked"
"""Said of a file that is not the one that was exported."""

_AGAIN = "copy it again, or export it again"
_RACY_NS = 50_000_000
"""A file changed so short a time ago may change once more without its times showing it."""


def stamp(proto: Any, folder: Path) -> None:
    """Write the digests into a model's metadata, in place.

    Args:
        proto: the model; files that its weights lie in have been written.
        folder: of those files.
    """
    kept = [entry for entry in proto.metadata_props if entry.key != KEY]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    found = {
        "graph": _graph(proto), "inside": _inside(proto),
        "files": {name: file_digest(folder / name) for name in _locations(proto)},
    }  # fmt: skip
    proto.metadata_props.add(key=KEY, value=json.dumps(found))


def check(proto: Any, path: Path) -> str:
    """Hold a model against the digests in its metadata.

    Args:
        proto: the model, read without the weights beside it; `vtk.runtime.data_files` has found these whole.
        path: of the model.

    Returns:
        What is to be said of it: nothing, or `REWRITTEN`.

    Raises:
        DataError: its weights are others than those that were exported.
    """
    told = next((entry.value for entry in proto.metadata_props if entry.key == KEY), None)
    if told is None:
        return ""
    try:
        found = json.loads(told)
        graph, inside, files = found["graph"], found["inside"], dict(found["files"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{path}: `{KEY}` in its metadata is damaged; {_AGAIN}") from error
    if graph != _graph(proto):
        return REWRITTEN
    if inside != _inside(proto):
        raise DataError(f"{path} is damaged: the weights in it are not those that were exported; {_AGAIN}")
    for name in _locations(proto):
        if files.get(name) != file_digest(path.parent / name):
            raise DataError(f"{path.parent / name} is damaged, or of another export: its bytes are not those that "
                            f"{path.name} was written with; {_AGAIN}")  # fmt: skip
    return ""


def content_digest(path: Path) -> str:
    """Return one digest of an ONNX file and of all files that its weights lie in."""
    import onnx

    proto = onnx.load(path, load_external_data=False)
    parts = [file_digest(path), *(f"{name} {file_digest(path.parent / name)}" for name in _locations(proto))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def check_archive(path: Path) -> None:
    """Hold the entries of a zip archive, such as a ``.pt2``, against their checksums: torch's own reader does not.

    Raises:
        DataError: one of them is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise DataError(f"{path} is not a readable archive ({error}); {_AGAIN}") from error
    if wrong is not None:
        raise DataError(f"{path} is damaged: the bytes of {wrong} are not those that were written; {_AGAIN}")


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes; computed once for as long as the file does not change.

    Raises:
        DataError: it cannot be read.
    """
    try:
        now = path.stat()
        state = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
        if time.time_ns() - max(now.st_mtime_ns, now.st_ctime_ns) < _RACY_NS:
            return _digest(str(path))
        return _remembered(str(path), state)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; {_AGAIN}") from error


@functools.lru_cache(maxsize=64)
def _remembered(path: str, state: tuple[int, ...]) -> str:
    return _digest(path)


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _locations(proto: Any) -> list[str]:
    """Return the names of the files beside a model, each once."""
    return list(dict.fromkeys(
        entry.value for tensor in proto.graph.initializer for entry in tensor.external_data if entry.key == "location"
    ))  # fmt: skip


def _graph(proto: Any) -> str:
    """Digest all that a graph is but its weights' bytes."""
    digest = hashlib.sha256()
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.node):
        digest.update(value.SerializeToString(deterministic=True) + b"\n")
    for tensor in proto.graph.initializer:
        places = [(entry.key, entry.value) for entry in tensor.external_data]
        digest.update(f"{tensor.name} {tensor.data_type} {list(tensor.dims)} {places}\n".encode())
    return digest.hexdigest()


def _inside(proto: Any) -> str:
    """Digest the weights that a file has inside."""
    digest = hashlib.sha256()
    for tensor in proto.graph.initializer:
        if not tensor.external_data:
            digest.update(tensor.raw_data or tensor.SerializeToString(deterministic=True))
    return digest.hexdigest()
