"""Lists the images of a table with one label per image, by part and class."""

from collections.abc import Sequence
from pathlib import Path

from vtk.data.sources.columns import Line, Lines, choose_parts, read_lines
from vtk.data.sources.label_separators import joined_labels, looks_joined
from vtk.data.sources.layout import Files, ImageSet, Layout, Part, class_name
from vtk.data.sources.listing import ImageFile, natural, stat_file
from vtk.data.sources.unused_files import LeftOut
from vtk.errors import DataError
from vtk.text import one_line

FORM = "path,label"


def read_label_table(
    table: Path, classes: Sequence[str] | None, *, keep_empty: bool, separator: str | None = None
) -> ImageSet:
    """Read a table; file names are relative to its folder.

    Args:
        table: the file (`vtk.data.sources.table`).
        classes: known class names (evaluation): a held-out part without training images is allowed.
        keep_empty: keep classes of one-hot columns without images.
        separator: of columns; None: detected.

    Raises:
        DataError: an invalid line, one without a label or with several, or one that contradicts an earlier line.
    """
    lines = read_lines(table, separator, FORM)
    parts, left, notes = choose_parts(lines)
    labels: dict[str, tuple[str, int]] = {}
    twice = 0
    for line in lines.lines:
        if parts.get(line.name) == "test":
            twice += line.name in labels
            labels.setdefault(line.name, ("", 0))
            continue
        label = _label(lines, line)
        first = labels.setdefault(line.name, (label, line.row.line))
        if first[0] != label:
            raise DataError(
                f"{table} line {line.row.line} labels {one_line(line.name)} {one_line(label)!r}, line "
                f"{first[1]} labels it {one_line(first[0])!r}; keep the right one, or give --multi-label if it has both"
            )
        twice += first[1] != line.row.line
    if twice:
        left["lines of an image named before"] = twice
        notes.append(f"repeated lines of {table.name}: {twice}")
    found: dict[str, Files] = {"train": {}, "val": {}}
    for name, (label, _) in labels.items():
        if (part := parts.get(name, "train")) != "test":
            found[part].setdefault(label, []).append(stat_file(table.parent, name))
    if not found["train"] and not found["val"]:
        raise DataError(f"{table} has no training images; write lines {FORM} or {FORM},val")
    if not found["train"] and classes is None:
        raise DataError(f"{table}: all {len(labels)} images are held out; put some into train")
    empty = tuple(natural(set(lines.columns or ()) - set(found["train"]) - set(found["val"])))
    if keep_empty:
        found["train"] |= {label: list[ImageFile]() for label in empty}
    if joined := joined_labels({label for files in found.values() for label in files}):
        notes.append(
            f"labels of {table.name} that are combinations of others, such as {one_line(joined[0])!r}: if they are "
            "several labels, give --multi-label"
        )
    cases: dict[str, str] = {}
    for label in natural({label for files in found.values() for label in files}):
        if (other := cases.setdefault(label.casefold(), label)) != label:
            notes.append(f"labels of {table.name} that differ only in case: {one_line(other)}, {label}")
    held = bool(found["val"])
    layout = Layout("split" if held else "flat", table if found["train"] else None, table if held else None)
    sides = (Part(found["train"], empty), Part(found["val"]))
    return ImageSet(table.parent, layout, sides, LeftOut(lines=left), (*lines.notes, *notes), table)


def _label(lines: Lines, line: Line) -> str:
    """Return the one label of a line."""
    where = f"{lines.table} line {line.row.line} is {line.row.text}"
    if lines.columns is not None:
        if len(line.on) != 1:
            many = "no label" if not line.on else f"{len(line.on)} labels"
            raise DataError(
                f"{where}: it has {many}, and without --multi-label an image has one; correct the line, or give "
                "--multi-label"
            )
        return line.on[0]
    if not line.label:
        raise DataError(f"{where}: it has no label; write {FORM}, or leave the line out")
    if looks_joined(line.label):
        raise DataError(
            f"{where}: {line.label!r} looks like several labels; give --multi-label, or rename it if it is one"
        )
    return class_name(line.label)
