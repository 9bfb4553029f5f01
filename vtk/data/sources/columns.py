"""Reads a table of labels by its columns: paths, labels, parts, or one column of 0 and 1 per label."""

import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vtk.data.sources.layout import TRAIN_NAMES, class_name
from vtk.data.sources.table import PATHS, Row, head_of, is_image_of, read_rows
from vtk.errors import DataError
from vtk.text import one_line

LABELS = (
    "label", "labels", "class", "classes", "class_name", "classname", "label_name", "category", "categories", "target",
    "targets", "tag", "tags", "annotation", "annotations", "species", "breed",
)  # fmt: skip
PARTS = ("split", "part", "subset", "set", "partition", "phase", "fold_name")
WORDS = {
    **dict.fromkeys(TRAIN_NAMES, "train"), **dict.fromkeys(("val", "validation", "valid"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}  # fmt: skip
_YES = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}


@dataclass(frozen=True)
class Line:
    """A line of a table.

    Attributes:
        row: the line's cells, for messages.
        name: the image's path with ``/``, relative to the table's folder if it is inside.
        label: the cell of labels; empty in a one-hot table.
        on: in a one-hot table, labels whose cell is 1.
        part: ``train``, ``val``, ``test`` or empty.
    """

    row: Row
    name: str
    label: str
    on: tuple[str, ...]
    part: str


@dataclass(frozen=True)
class Lines:
    """The lines of a table.

    Attributes:
        table: the file.
        lines: of images.
        columns: labels of a one-hot table, in the order of its columns; None for other tables.
        notes: how columns were interpreted, if not obvious.
    """

    table: Path
    lines: tuple[Line, ...]
    columns: tuple[str, ...] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Columns:
    path: int
    label: int | None
    part: int | None
    hot: dict[int, str]
    count: int


def read_lines(table: Path, separator: str | None, form: str) -> Lines:
    """Read a table; columns are found by name, or are path, label and part in a table without names.

    Args:
        table: the file.
        separator: of columns; None: detected.
        form: expected form of a line, for messages, such as ``path,label``.

    Raises:
        DataError: a line of another form, or unknown column names; the message quotes the line.
    """
    rows = read_rows(table, separator)
    heads = head_of(rows, table)
    notes: list[str] = []
    body = rows if heads is None else rows[1:]
    if not body:
        raise DataError(f"{table} names no images; write lines {form}")
    columns = _Columns(0, 1, 2, {}, 3) if heads is None else _find_columns(table, rows[0], heads, body, notes)
    lines = tuple(_read_line(table, row, columns, form) for row in body)
    if outside := sum(os.path.isabs(line.name) for line in lines):
        notes.append(f"lines of {table.name} with an absolute path outside its folder: {outside}")
    return Lines(table, lines, tuple(columns.hot.values()) if columns.hot else None, notes)


def _find_columns(table: Path, row: Row, heads: Sequence[str], body: Sequence[Row], notes: list[str]) -> _Columns:
    path = next(heads.index(name) for name in PATHS if name in heads)
    label, part = (next((heads.index(n) for n in known if n in heads), None) for known in (LABELS, PARTS))
    others = [i for i in range(len(heads)) if i not in (path, label, part)]
    if part is None and (part := next((i for i in others if _are_words(body, i)), None)) is not None:
        others.remove(part)
        notes.append(f"the column {one_line(row.cells[part])} of {table.name} is used as the split")
    hot: dict[int, str] = {}
    if label is None:
        cells = [[row.cells[i].lower() for i in others] for row in body if len(row.cells) == len(heads)]
        if len(others) > 1 and cells and all(cell in _YES for of_row in cells for cell in of_row):
            hot, others = {i: class_name(row.cells[i]) for i in others}, []
            if len(set(hot.values())) < len(hot):
                raise DataError(
                    f"{table} line {row.line} is {row.text}: two columns have the same name; name each label once"
                )
        elif len(others) == 1:
            label, others = others[0], []
            notes.append(f"the column {one_line(row.cells[label])} of {table.name} is used as the label")
        else:
            raise DataError(
                f"{table} line {row.line} is {row.text}: no column is named label; name the columns path,label or "
                "path,label,split, or one of 0 and 1 for each label"
            )
    if others:
        unused = ", ".join(one_line(row.cells[i]) or "(no name)" for i in others[:8])
        notes.append(f"unused columns of {table.name}: {unused}")
    return _Columns(path, label, part, hot, len(heads))


def _are_words(body: Sequence[Row], at: int) -> bool:
    """Return whether a column has names of parts only."""
    cells = {row.cells[at].lower() for row in body if len(row.cells) > at} - {""}
    return bool(cells) and cells <= WORDS.keys()


def _read_line(table: Path, row: Row, columns: _Columns, form: str) -> Line:
    needed = max(columns.path, *columns.hot, columns.label or 0) + 1
    count, part_at = columns.count, columns.part
    if len(row.cells) == 3 and count == 2 and columns.path == 0:
        count, part_at = 3, 2  # a part without a column name, as in version 0.1
    cells = row.cells
    while len(cells) > count and not cells[-1]:  # trailing separators, as spreadsheets write them
        cells = cells[:-1]
    name = cells[columns.path] if len(cells) > columns.path else ""
    part = cells[part_at].lower() if part_at is not None and len(cells) > part_at else ""
    if not name or "\0" in name or not needed <= len(cells) <= count or (part and part not in WORDS):
        raise DataError(f"{table} line {row.line} is {row.text}; write {form} or {form},val")
    if columns.hot and (odd := next((cells[i] for i in columns.hot if cells[i].lower() not in _YES), None)) is not None:
        raise DataError(f"{table} line {row.line} is {row.text}: {odd!r} is neither 0 nor 1")
    on = tuple(label for i, label in columns.hot.items() if _YES[cells[i].lower()])
    label = "" if columns.label is None else cells[columns.label]
    plain = _plain_name(table.parent, name)
    if plain == ".." or plain.startswith("../"):
        raise DataError(
            f"{table} line {row.line} names {one_line(name)}, which is outside the table's folder; put the table "
            "into a folder that contains all its images, or write absolute paths"
        )
    return Line(row, plain, label, on, WORDS.get(part, ""))


def _plain_name(root: Path, name: str) -> str:
    """Return the normal form of a path: ``./a.jpg``, ``a.jpg`` and the absolute path are the same image.

    A name that begins with ``..`` is outside the folder.
    """
    if "\\" in name and not is_image_at(root, name):
        name = name.replace("\\", "/")  # of a table written on Windows
    plain = posixpath.normpath(name)
    if os.path.isabs(name) or plain.startswith("../"):
        base = os.path.abspath(root)
        whole = os.path.normpath(os.path.join(base, name))
        if whole.startswith(base.rstrip(os.sep) + os.sep):
            return posixpath.normpath(os.path.relpath(whole, base))
        return os.path.normpath(name)
    return plain


def is_image_at(root: Path, name: str) -> bool:
    """Return whether there is such a file."""
    try:
        return (root / name).exists()
    except (OSError, ValueError):
        return False


def choose_parts(lines: Lines) -> tuple[dict[str, str], dict[str, int], list[str]]:
    """Return the part of each image, counts of unused lines, and notes.

    If some lines have ``val`` and some ``test``, the test images are not used, as with folders. If none has ``val``,
    the test images are held out. If some images are held out, images without a part are training images.

    Returns:
        Name → ``train``, ``val``, or ``test`` for unused images (empty if nothing is held out); reason → number of
        unused lines; notes.

    Raises:
        DataError: an image is in two parts.
    """
    parts: dict[str, str] = {}
    table = lines.table
    for line in lines.lines:
        if line.part and parts.setdefault(line.name, line.part) != line.part:
            raise DataError(
                f"{table} line {line.row.line} puts {one_line(line.name)} into {line.part}, but an earlier line "
                "does not; keep one of them"
            )
    words, names = set(parts.values()), {line.name for line in lines.lines}
    notes, left = [], {}
    if {"val", "test"} <= words:
        count = sum(part == "test" for part in parts.values())
        left["in the test part of the table"] = count
        notes.append(f"unused: {count} test images of {table.name}, since val is held out")
    elif "test" in words:
        parts = {name: "val" if part == "test" else part for name, part in parts.items()}
        notes.append(f"the test images of {table.name} are held out, since it has no val")
    if parts and "val" not in parts.values():
        notes.append(f"{table.name} has no val images: a part of train is held out")
        parts = {}
    elif parts and (rest := len(names) - len(parts)):
        notes.append(f"images of {table.name} without a part, used as train: {rest}")
    return parts, left, notes


__all__ = ["Line", "Lines", "choose_parts", "is_image_of", "read_lines"]
