"""Writes ``tasks.json``, the index of tasks and files, and publishes an export's files into its folder.

Data files are named by their content, so that an .onnx file never meets the data of another export.
"""

import hashlib
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from vtk.card import Card
from vtk.errors import DataError
from vtk.formats import read_json, write_json
from vtk.marks import Recognise, any_of, begins, json_with, png, safetensors_with
from vtk.readers import reading
from vtk_export.output_folder import CARD, GRAPH, LATENCY, move
from vtk_export.readme import IS_OURS, README

INDEX, FORMAT = "tasks.json", 1
LAYOUT, SERVED, SUFFIX = "factors.json", "vtk_factors", ".safetensors"
"""In the form ``factors``: layout of the stacks, stem of the code that runs it, and suffix of the tasks' files."""
METADATA = "vtk.factors"
"""Key of the metadata of a task's file."""
SESSION_OPTIONS = {"session.disable_prepacking": "1"}
"""Entries for ``SessionOptions.add_session_config_entry`` without which every session copies the shared weights."""

COMMAND = "vtk export tasks"
_LISTED = json_with("format", "files")
_DATA = re.compile(r".*-([0-9a-f]{12})\.data")
_KNOWN = (".onnx", ".json", ".data", ".png", SUFFIX, f"{SERVED}.py", README)


def temperature_entry(card: Card) -> dict[str, float]:
    """Return what an index says of a task's temperature: nothing where its probabilities are not calibrated."""
    return {} if card.temperature == 1 else {"temperature": card.temperature}


def _is_data(path: Path) -> bool:
    """Return whether a file of weights matches the digest in its name."""
    named = _DATA.fullmatch(path.name)
    if named is None:
        return False
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest().startswith(named[1])


_BY_SUFFIX: dict[str, Recognise] = {
    ".md": IS_OURS, ".onnx": GRAPH, ".json": any_of(CARD, LATENCY["latency.json"]), ".data": _is_data, ".png": png(),
    SUFFIX: safetensors_with(METADATA), ".py": begins('"""Many tasks of one ONNX model'),
}  # fmt: skip


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


def marks(names: Collection[str]) -> dict[str, Recognise]:
    """Return the recognisers of the files of such an export."""
    found: dict[str, Recognise] = {}
    for name in names:
        found[name] = _BY_SUFFIX.get(Path(name).suffix, CARD)
        if name.endswith(".latency.png"):
            found[name] = png((f"{name.removesuffix('.png')}.json", LATENCY["latency.json"]))
    if LAYOUT in found:
        found[LAYOUT] = json_with("format", "stacks")
        code = found[f"{SERVED}.py"] = _BY_SUFFIX[".py"]
        # Python leaves it at an import
        found[f"__pycache__/{SERVED}.*.pyc"] = lambda path: code(path.parent.parent / f"{SERVED}.py")
    return {**found, INDEX: _LISTED, README: IS_OURS}


def publish(folder: Path, out: Path, index: dict[str, Any]) -> int:
    """Publish the files of ``folder`` and an index in place of those of an earlier export, all of them or none.

    Returns:
        Bytes of these files.

    Raises:
        DataError: something else stands in a file's place, found before anything is moved; or ``out`` cannot be
            written.
    """
    new = sorted(file.name for file in folder.iterdir())
    write_json(folder / INDEX, {"format": FORMAT, **index, "files": new})
    total = sum(file.stat().st_size for file in folder.iterdir())
    move(folder, out, command=COMMAND, marks=marks({*known_files(out), *new}))
    return total


def remember(out: Path, names: Collection[str]) -> None:
    """Add derived files to the index, so that the next export removes them.

    Raises:
        DataError: the index is damaged, or cannot be written.
    """
    value = read_json(out / INDEX)
    with reading(out / INDEX, "is not the index of an export", "export again"):
        files = sorted({*value["files"], *names})
    write_json(out / INDEX, {**value, "files": files})
