"""``tasks.json``: which files belong to which task; and how the files of an export reach their folder.

Data files are named by their content, so an .onnx file never meets the data of another export. The index is the last
to be replaced; while files move, one in its place lists both exports' files, from which a later export can clear up.
"""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from vtk.errors import DataError
from vtk.files import replace_file
from vtk.formats import read_json, write_json

INDEX, FORMAT = "tasks.json", 1
SESSION_OPTIONS = {"session.disable_prepacking": "1"}
"""Entries for ``SessionOptions.add_session_config_entry`` without which every session copies the shared weights."""

_SUFFIXES = (".onnx", ".json", ".data")
_KNOWN = (*_SUFFIXES, ".png")


def known_files(out: Path) -> frozenset[str]:
    """Return the names of the files in ``out`` that an earlier export wrote; none where its index cannot be read."""
    try:
        value = read_json(out / INDEX)
    except DataError:
        return frozenset()
    names = value.get("files") if isinstance(value, dict) and value.get("format") == FORMAT else None
    if not isinstance(names, list):
        return frozenset()
    plain = {n for n in names if isinstance(n, str) and Path(n).name == n and n.endswith(_KNOWN)}
    return frozenset(plain | {INDEX})


def publish(folder: Path, out: Path, index: dict[str, Any]) -> None:
    """Move the files of ``folder`` into ``out``, write the index, and delete what only an earlier export had.

    Raises:
        DataError: a folder stands in a file's place, found before anything is moved; or ``out`` cannot be written.
    """
    new = sorted(file.name for file in folder.iterdir())
    old = known_files(out)
    for name in (*new, INDEX):
        if (out / name).is_dir():
            raise DataError(f"{out / name} is a folder where a file of the export belongs; give another `--out`")
    if old:
        write_json(out / INDEX, {"format": FORMAT, "files": sorted({*old, *new} - {INDEX})})
    for name in sorted(new, key=_last_onnx):
        with replace_file(out / name) as tmp:
            os.replace(folder / name, tmp)
    write_json(out / INDEX, {"format": FORMAT, **index, "files": new})
    for stale in (out / name for name in old - {*new, INDEX} if (out / name).exists()):
        # where capitals do not count, an old name may be a new file's
        if not any(name.casefold() == stale.name.casefold() and stale.samefile(out / name) for name in new):
            stale.unlink()


def remember(out: Path, names: Collection[str]) -> None:
    """Add files to the index that were made of an export's, so that the next one takes them away.

    Raises:
        DataError: the index is damaged, or cannot be written.
    """
    value = read_json(out / INDEX)
    write_json(out / INDEX, {**value, "files": sorted({*value["files"], *names})})


def _last_onnx(name: str) -> tuple[int, str]:
    """Order data before cards before graphs, so that a graph is there only with all it needs."""
    return (_SUFFIXES[::-1].index(Path(name).suffix), name)
