"""Weights packed as this computer's ONNX Runtime multiplies them, in one file for all tasks; part of a model of many.

A session that packs its weights has its own copy of them, one that does not is slower. So they are packed once into
files, which sessions map into memory; what tasks have in common lies there once, and is in memory once. The packing
depends on the CPU and on the release of ONNX Runtime, so the files belong to neither the model nor another computer:
they are in a folder of the user's cache, named by all they depend on.

Needs onnxruntime, and nothing that reads ONNX: of the files only the places of tensors change, which are a few fields.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

import onnxruntime as ort

FORMAT, WEIGHTS = 1, "weights"
LEAST = 256
"""Bytes below which a tensor stays inside its graph."""

_ALIGN = 4096
# of onnx.proto: ModelProto.graph, GraphProto.initializer, TensorProto.external_data; an entry's key and value
_GRAPH, _INITIALIZER, _EXTERNAL, _KEY, _VALUE = 7, 5, 13, 1, 2
_BYTES = 2
"""Wire type of a field that has a length in front."""


def digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the SHA-256 of each ONNX file and of each data file beside one, by its name in their folder."""
    data = {path for model in files.values() for path in model.parent.glob("*.data")}
    return {path.name: _sha256(path) for path in sorted({*files.values(), *data})}


def prepare(
    files: Mapping[str, Path], cache: Path | None = None, known: Mapping[str, str] | None = None
) -> dict[str, Path]:
    """Return files of the same models with packed weights; they are made if this is the first time.

    Args:
        files: name to ONNX file.
        cache: folder to keep them in; by default ``$VTK_PREPACKED``, or one in the user's cache.
        known: what `digests` returns of them, where that has been computed already.

    Raises:
        OSError: they cannot be written.
    """
    cache = cache or Path(os.environ.get("VTK_PREPACKED") or _user_cache() / "vit-toolkit" / "prepacked")
    folder = cache / _key(files, digests(files) if known is None else known)
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".tmp-", dir=cache))
        try:
            _make(files, made)
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another instance was quicker, and its files are the same
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
            _give_back()
    return {name: folder / f"{i}.onnx" for i, name in enumerate(files)}


def _make(files: Mapping[str, Path], folder: Path) -> None:
    """Let ONNX Runtime write each model with its packed weights, and join the weights of all in one file."""
    with (folder / WEIGHTS).open("wb") as file:
        shared = _Shared(file)
        for i, path in enumerate(files.values()):
            options = ort.SessionOptions()
            options.log_severity_level = 4  # it warns that the file is for this computer only, which it is meant to be
            options.optimized_model_filepath = str(folder / "one.onnx")
            for key, value in (
                ("session.optimized_model_external_initializers_file_name", "one.data"),
                ("session.optimized_model_external_initializers_min_size_in_bytes", str(LEAST)),
                ("session.save_external_prepacked_constant_initializers", "1"),
            ):
                options.add_session_config_entry(key, value)
            ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            with (folder / "one.data").open("rb") as data:
                moved = move((folder / "one.onnx").read_bytes(), partial(shared.take, data))
            (folder / f"{i}.onnx").write_bytes(moved)
            (folder / "one.onnx").unlink()
            (folder / "one.data").unlink()


class _Shared:
    """A file in which every piece of data lies once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._places: dict[bytes, int] = {}

    def take(self, data: BinaryIO, offset: int, length: int) -> int:
        """Return where a part of another file lies in this one, and copy it if it does not."""
        data.seek(offset)
        part = data.read(length)
        key = hashlib.sha256(part).digest()
        if key not in self._places:
            self._file.write(bytes(-self._file.tell() % _ALIGN))
            self._places[key] = self._file.tell()
            self._file.write(part)
        return self._places[key]


def move(model: bytes, place: Callable[[int, int], int]) -> bytes:
    """Return an ONNX model whose external tensors lie elsewhere.

    Args:
        model: serialised.
        place: maps an offset and a length to the new offset.
    """

    def graph(raw: bytes) -> bytes:
        return _change(raw, _INITIALIZER, tensor)

    def tensor(raw: bytes) -> bytes:
        return _move_tensor(raw, place)

    return _change(model, _GRAPH, graph)


def _move_tensor(raw: bytes, place: Callable[[int, int], int]) -> bytes:
    entries: dict[str, str] = {}
    kept = []
    for number, kind, value in _fields(raw):
        if (number, kind) == (_EXTERNAL, _BYTES):
            parts = {n: part.decode() for n, _, part in _fields(value)}
            entries[parts[_KEY]] = parts[_VALUE]
        else:
            kept.append(_field(number, kind, value))
    if "location" not in entries:
        return raw
    entries["location"] = WEIGHTS
    entries["offset"] = str(place(int(entries["offset"]), int(entries["length"])))
    for key, text in entries.items():
        if key.startswith("prepacked"):  # the kernel's key, then offset, length and checksum of each piece
            name, *blobs = text.split("|")
            entries[key] = "|".join([name, *(_move_blob(blob, place) for blob in blobs)])
    pairs = [_field(_KEY, _BYTES, k.encode()) + _field(_VALUE, _BYTES, v.encode()) for k, v in entries.items()]
    return b"".join([*kept, *(_field(_EXTERNAL, _BYTES, pair) for pair in pairs)])


def _move_blob(blob: str, place: Callable[[int, int], int]) -> str:
    offset, length, *rest = blob.split(";")
    return ";".join([str(place(int(offset), int(length))), length, *rest])


def _change(message: bytes, wanted: int, change: Callable[[bytes], bytes]) -> bytes:
    """Return a message with ``change`` applied to each field of one number."""
    return b"".join(
        _field(number, kind, change(value) if (number, kind) == (wanted, _BYTES) else value)
        for number, kind, value in _fields(message)
    )


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Walk through the fields of a protobuf message: number, wire type, and the value's bytes without its length."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        start = at
        if kind == 0:
            _, at = _varint(message, at)
        elif kind == _BYTES:
            length, start = _varint(message, at)
            at = start + length
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of wire type {kind} in an ONNX file")
        yield number, kind, message[start:at]


def _field(number: int, kind: int, value: bytes) -> bytes:
    return _write_varint(number << 3 | kind) + (_write_varint(len(value)) if kind == _BYTES else b"") + value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _write_varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _key(files: Mapping[str, Path], known: Mapping[str, str]) -> str:
    """Name everything that the packed files depend on: the weights beside a model are not in its own file."""
    models = [f"{name} {path.name}" for name, path in files.items()]
    lines = [f"{FORMAT} {ort.__version__} {_cpu()}", *models, *(f"{name} {known[name]}" for name in sorted(known))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]


def _sha256(path: Path) -> str:
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            hasher.update(part)
    return hasher.hexdigest()


def _give_back() -> None:
    """Return what packing took to the system: glibc would keep tens of megabytes for as long as the model serves."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _cpu() -> str:
    """Return the CPU's kind and instruction sets."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
        lines = [line for line in text.splitlines() if line.partition("\t")[0] in ("model name", "flags", "Features")]
    return "\n".join([platform.machine(), platform.processor(), *lines])


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
