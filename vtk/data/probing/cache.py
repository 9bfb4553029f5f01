"""What earlier scans of a folder found, so that only new and changed files are decoded again."""

import gc
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import PIL

from vtk import console, files
from vtk.data.decoding.rules import Rules
from vtk.data.probing.probe import EMPTY, Probe
from vtk.data.sources.listing import Found
from vtk.errors import DataError

_FORMAT = 7
_LIMIT = 1 << 30
_TYPES = tuple(map(type, EMPTY))

Known = dict[str, tuple[Found, Probe]]
"""File name below the root → the file as it was found, and what decoding told."""


def cache_path(root: Path, in_chans: int = 3, rules: Rules = "srgb") -> Path:
    """Return the file that remembers ``root``: ``$VTK_HOME/scan/<hash of its real path>.json``.

    A file that fills three channels need not fill six, so other numbers of channels are remembered apart, and so are
    other rules of decoding.
    """
    name = hashlib.sha256(str(root.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    marks = [str(in_chans)] * (in_chans != 3) + [rules] * (rules != "srgb")
    return files.home() / "scan" / f"{'-'.join([name, *marks])}.json"


def load(root: Path, in_chans: int = 3, rules: Rules = "srgb") -> Known:
    """Return what is known about ``root``; nothing if the file is absent, damaged or by another Pillow."""
    path = cache_path(root, in_chans, rules)
    if not path.is_file():
        return {}
    collecting = gc.isenabled()
    gc.disable()  # a hundred thousand lists that all stay: looking for garbage among them takes as long as reading them
    try:
        value = _read(path)
        if value["format"] != _FORMAT or value["pillow"] != PIL.__version__:
            return {}
        entries = value["files"]
        _check_columns([found for found, _ in entries.values()], (int, int, int))
        _check_columns([told for _, told in entries.values()], _TYPES)
        return {name: (Found(name, *found), Probe(*told)) for name, (found, told) in entries.items()}
    except Exception:  # whatever damage does to a cache: it is made anew
        return {}
    finally:
        if collecting:
            gc.enable()


def save(
    root: Path, found: Sequence[Found], probes: Mapping[str, Probe], in_chans: int = 3, rules: Rules = "srgb"
) -> None:
    """Remember the good files of ``root``; a bad one is looked at again, in case only its permissions were wrong."""
    entries = {file.name: [file[1:], probes[file.name]] for file in found if not probes[file.name].bad}
    value = {"format": _FORMAT, "pillow": PIL.__version__, "root": str(root.resolve()), "files": entries}
    try:
        files.write_text(cache_path(root, in_chans, rules), json.dumps(value, separators=(",", ":")))
    except DataError as error:
        console.warn(f"the scan is not remembered: {error}")


def _read(path: Path) -> Any:
    """Read JSON of our own, whose values are checked column by column: `formats.parse_json` looks at each of them."""
    if path.stat().st_size > _LIMIT:
        raise ValueError("it is too large")
    return json.loads(path.read_bytes())


def _check_columns(rows: Sequence[Sequence[Any]], types: tuple[type, ...]) -> None:
    """Refuse rows of another length, or a value of another type than its column's: that is damage."""
    for column, wanted in zip(zip(*rows, strict=True), types, strict=True) if rows else ():
        if set(map(type, column)) != {wanted}:
            raise ValueError(f"a value is no {wanted.__name__}")
