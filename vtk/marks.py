"""Recognises files that this toolkit wrote by their contents, never by their names alone.

A command knows each name that it writes, and for each name how its own file is recognised (`Marks`). What is there
under such a name and is not recognised belongs to somebody else: it is neither replaced nor deleted.
"""

import fnmatch
import json
import os
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from vtk.errors import DataError
from vtk.formats import read_json
from vtk.nodes import HIDDEN

Recognise = Callable[[Path], bool]
"""Whether a regular file is ours."""
Marks = Mapping[str, Recognise]
"""By path relative to the output folder, with ``/``; the last part may be a pattern (``figures/*.png``)."""

SOFTWARE = {"Software": "vtk"}
"""Metadata of the PNG files that this toolkit draws."""
_LONGEST_TEXT = 1 << 14
_TAIL = 32 << 20


def json_with(*keys: str) -> Recognise:
    """Recognise a JSON object by keys that it must have, all of them."""

    def recognise(path: Path) -> bool:
        try:
            found = read_json(path)
        except DataError:
            return False
        return isinstance(found, dict) and set(keys) <= found.keys()

    return recognise


def json_lines_with(*keys: str) -> Recognise:
    """Recognise a file of one JSON object a line by the keys of the first."""

    def recognise(path: Path) -> bool:
        try:
            found = json.loads(_head(path).partition(b"\n")[0])
        except (ValueError, RecursionError):
            return False
        return isinstance(found, dict) and set(keys) <= found.keys()

    return recognise


def header_with(*columns: str) -> Recognise:
    """Recognise a CSV file by columns that it must have, all of them."""

    def recognise(path: Path) -> bool:
        header = _head(path).partition(b"\n")[0].decode("utf-8", "replace").split(",")
        return set(columns) <= {name.strip() for name in header}

    return recognise


def begins(*starts: str) -> Recognise:
    """Recognise a text file by how it begins."""
    wanted = tuple(start.encode() for start in starts)
    return lambda path: _head(path).startswith(wanted)


def says(*texts: str) -> Recognise:
    """Recognise a text file by a text near its beginning."""
    return lambda path: any(text.encode() in _head(path) for text in texts)


def safetensors_with(*keys: str) -> Recognise:
    """Recognise a safetensors file by one of the keys of its metadata."""

    def recognise(path: Path) -> bool:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(path.stat().st_size, _TAIL):
                return False
            try:
                header = json.loads(file.read(length))
            except (ValueError, RecursionError):
                return False
        found = header.get("__metadata__") if isinstance(header, dict) else None
        return isinstance(found, dict) and not found.keys().isdisjoint(keys)

    return recognise


def page(*more: str) -> Recognise:
    """Recognise a page of `vtk.html`, of this version by its ``generator`` and of 0.1 by the colours of its style."""
    return says(
        '<meta name="generator" content="vtk', ":root { color-scheme: light dark; --ink: #1c1c1e; --dim:", *more
    )


def png(*beside: tuple[str, Recognise], within: Callable[[], bool] | None = None, dpi: int = 130) -> Recognise:
    """Recognise a plot by its ``Software``.

    Version 0.1 left the one of Matplotlib there. Such a plot is ours if it has the resolution of ours and one of the
    files that were written with it, ``beside``, is recognised, too, or if ``within`` says so.
    """

    def recognise(path: Path) -> bool:
        text = _png(path)
        if text.get("Software", "").startswith(SOFTWARE["Software"]):
            return True
        if not text.get("Software", "").startswith("Matplotlib") or text.get("dpi") != str(dpi):
            return False
        return any(_ours(path.with_name(name), mark) for name, mark in beside) or (within is not None and within())

    return recognise


def at(path: Path, mark: Recognise) -> Callable[[], bool]:
    """Return what tells whether the file at ``path`` is recognised."""
    return lambda: _ours(path, mark)


def within(mark: Recognise, further: Callable[[], bool]) -> Recognise:
    """Recognise what ``mark`` does, where ``further`` holds too."""
    return lambda path: mark(path) and further()


def any_of(*marks: Recognise) -> Recognise:
    """Recognise what one of several does."""
    return lambda path: any(mark(path) for mark in marks)


def tail_says(*texts: bytes) -> Recognise:
    """Recognise a binary file by all of some bytes near its end, where a protobuf has its last fields."""

    def recognise(path: Path) -> bool:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _TAIL, 0))
            data = file.read()
        return all(text in data for text in texts)

    return recognise


def beside(name: str, mark: Recognise) -> Recognise:
    """Recognise a file that has no room for a mark by the file it belongs to."""
    return lambda path: _ours(path.with_name(name), mark)


def find_own(folder: Path, marks: Marks, command: str, option: str = "`--out`") -> list[str]:
    """Return which of the names of ``marks`` are in ``folder``.

    Raises:
        DataError: one of them is a file that ``command`` did not write, a folder, a device or a link.
    """
    found = []
    for name in _there(folder, marks):
        path = folder / name
        mark = next(mark for pattern, mark in marks.items() if _fits(name, pattern))
        if not _ours(path, mark):
            what = "a folder" if path.is_dir() else "a link" if path.is_symlink() else "a file"
            raise DataError(
                f"{option} {folder} holds {name}, {what} that `{command}` did not write; move it away, or give another "
                "folder"
            )
        found.append(name)
    return found


def _there(folder: Path, marks: Marks) -> Iterator[str]:
    for pattern in marks:
        above, _, last = pattern.rpartition("/")
        place = folder / above
        if not os.path.lexists(place):
            continue
        if place.is_symlink() or not place.is_dir():
            if above:
                raise DataError(f"{place} is not the folder that belongs there; move it away, or give another folder")
            continue
        for entry in sorted(os.listdir(place)):
            if fnmatch.fnmatchcase(entry, last):
                yield f"{above}/{entry}" if above else entry


def others(folder: Path, marks: Marks) -> list[str]:
    """Return the files of a folder, and of the folders that ``marks`` names in it, that have none of its names."""
    above = {str(parent) for pattern in marks for parent in PurePosixPath(pattern).parents}

    def walk(place: Path, prefix: str) -> Iterator[str]:
        for entry in sorted(os.listdir(place)):
            name = prefix + entry
            if (not prefix and entry.startswith(HIDDEN)) or any(_fits(name, pattern) for pattern in marks):
                continue
            if name in above and (place / entry).is_dir() and not (place / entry).is_symlink():
                yield from walk(place / entry, f"{name}/")
            else:
                yield name

    return list(walk(folder, "")) if folder.is_dir() else []


def _fits(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern)


def _ours(path: Path, mark: Recognise) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode) and mark(path)
    except Exception:  # damaged beyond what a reader knows of: none of ours, so it stays
        return False


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_LONGEST_TEXT)


def _png(path: Path) -> dict[str, str]:
    """Return the texts of a PNG file, and its resolution as ``dpi``."""
    data, found = _head(path), {}
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return {}
    at = 8
    while at + 8 <= len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        if kind == b"tEXt":
            key, _, text = body.partition(b"\0")
            found[key.decode("latin-1")] = text.decode("latin-1")
        elif kind == b"pHYs" and len(body) == 9:
            found["dpi"] = str(round(int.from_bytes(body[:4]) * 0.0254))
        elif kind == b"IDAT":
            break
        at += 12 + length
    return found
