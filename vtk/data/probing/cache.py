"""Stores the results of scans, so that only new and changed files are decoded again."""

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
from vtk.data.sources.listing import ImageFile
from vtk.errors import DataError

_FORMAT = 7
_LIMIT = 1 << 30
_TYPES = tuple(map(type, EMPTY))

Known = dict[str, tuple[ImageFile, Probe]]
"""File name relative to the root → the file, and its probe."""


def cache_path(root: Path, in_chans: int = 3, rules: Rules = "srgb") -> Path:
    """Return the cache file of ``root``: ``$VTK_HOME/scan/<hash of its real path>.json``.

    Other numbers of channels and other rules of decoding have files of their own, since they change which images are
    readable.
    """
    name = hashlib.sha256(str(root.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    marks = [str(in_chans)] * (in_chans != 3) + [rules] * (rules != "srgb")
    return files.home() / "scan" / f"{'-'.join([name, *marks])}.json"


def load(root: Path, in_chans: int = 3, rules: Rules = "srgb") -> Known:
    """Return the cached probes of ``root``; none if the file is absent, damaged or from another version of Pillow."""
    path = cache_path(root, in_chans, rules)
    if not path.is_file():
        return {}
    collecting = gc.isenabled()
    gc.disable()  # garbage collection among many thousand live lists takes as long as reading them
    try:
        value = _read(path)
        if value["format"] != _FORMAT or value["pillow"] != PIL.__version__:
            return {}
        entries = value["files"]
        _check_columns([found for found, _ in entries.values()], (int, int, int))
        _check_columns([probe for _, probe in entries.values()], _TYPES)
        return {name: (ImageFile(name, *found), Probe(*probe)) for name, (found, probe) in entries.items()}
    except Exception:  # a damaged cache is rebuilt
        return {}
    finally:
        if collecting:
            gc.enable()


def save(
    root: Path, found: Sequence[ImageFile], probes: Mapping[str, Probe], in_chans: int = 3, rules: Rules = "srgb"
) -> None:
    """Store the probes of the good files of ``root``; unreadable ones are tried again by the next scan."""
    entries = {file.name: [file[1:], probes[file.name]] for file in found if not probes[file.name].bad}
    value = {"format": _FORMAT, "pillow": PIL.__version__, "root": str(root.resolve()), "files": entries}
    try:
        files.write_text(cache_path(root, in_chans, rules), json.dumps(value, separators=(",", ":")))
    except DataError as error:
        console.warn(f"the scan cannot be cached: {error}")


def _read(path: Path) -> Any:
    """Read the JSON; its values are checked by column, which is faster than `formats.parse_json`."""
    if path.stat().st_size > _LIMIT:
        raise ValueError("it is too large")
    return json.loads(path.read_bytes())


def _check_columns(rows: Sequence[Sequence[Any]], types: tuple[type, ...]) -> None:
    """Refuse damaged rows: another length, or a value of another type than its column's."""
    for column, wanted in zip(zip(*rows, strict=True), types, strict=True) if rows else ():
        if set(map(type, column)) != {wanted}:
            raise ValueError(f"a value is no {wanted.__name__}")
