"""Lists the images and labels of a multi-label set: from a table, or from the folders above each image.

A table has a line ``path,label1;label2`` for each image, or a column of 0 and 1 for each label, and optionally its
part (`vtk.data.sources.columns`). Paths are relative to the table's folder. In folders an image may be at any depth
(``beach/dog/1.jpg`` has both labels), and byte-identical files of one name in several folders are one image with all
their labels; files directly in the folder have no label.
"""

import hashlib
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from vtk.data.sources.columns import choose_parts, read_lines
from vtk.data.sources.label_separators import find_separator, split_labels
from vtk.data.sources.layout import TRAIN_NAMES, VAL_NAMES, class_name, is_text
from vtk.data.sources.listing import folders, natural, note_unused, walk
from vtk.data.sources.table import is_table
from vtk.data.sources.unused_files import LeftOut, UnusedFiles, summarize
from vtk.errors import DataError
from vtk.text import one_line

_PARTS = {**dict.fromkeys(TRAIN_NAMES, "train"), **dict.fromkeys(VAL_NAMES, "val")}


@dataclass
class MultilabelSet:
    """Images of a multi-label set.

    Attributes:
        root: folder that names are relative to.
        labels: of each image, by name.
        parts: ``train`` or ``val`` of each image; empty if the set has no split.
        notes: for the user, one sentence each.
        warnings: probable mistakes.
        left: unused files.
        known: labels of one-hot columns, with or without images.
    """

    root: Path
    labels: dict[str, set[str]] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    left: LeftOut = field(default_factory=LeftOut)
    known: tuple[str, ...] = ()


def read_multilabel_set(
    root: Path,
    *,
    field_separator: str | None = None,
    label_separator: str | None = None,
    known: Collection[str] = (),
) -> MultilabelSet:
    """Return the images of a table, of a folder with ``labels.csv``, or of folders named by labels.

    Args:
        root: table or folder.
        field_separator: of a table's columns; None: detected.
        label_separator: of an image's labels in a table; None: detected.
        known: labels of a trained model.

    Raises:
        DataError: no images, an invalid line, a label that is not text, or a part in place of a label.
    """
    inner = root / "labels.csv"
    if is_table(root) or inner.is_file():
        return _read_table(root if is_table(root) else inner, field_separator, label_separator, known)
    return _read_folders(root)


def _read_table(
    table: Path, field_separator: str | None, label_separator: str | None, known: Collection[str]
) -> MultilabelSet:
    lines = read_lines(table, field_separator, "path,label1;label2")
    listed = MultilabelSet(table.parent, notes=list(lines.notes))
    separator, note = label_separator or "", ""
    if not separator:
        separator, note = find_separator(table, [line.label for line in lines.lines], known)
    parts, left, notes = choose_parts(lines)
    for line in lines.lines:
        if parts.get(line.name) != "test":
            listed.labels.setdefault(line.name, set()).update(line.on or split_labels(line.label, separator))
    listed.parts.update({name: part for name, part in parts.items() if part != "test"})
    listed.known = lines.columns or ()
    listed.notes += [*filter(None, [note]), *notes]
    if twice := len(lines.lines) - len({line.name for line in lines.lines}):
        left["lines of an image named before"] = twice
        listed.notes.append(f"repeated lines of {table.name}, with labels merged: {twice}")
    listed.left = LeftOut(lines=left)
    if not listed.labels:
        raise DataError(f"{table} names no images; write lines path,label1;label2")
    return listed


def _read_folders(root: Path) -> MultilabelSet:
    names, rest, merged = folders(root), UnusedFiles(), 0
    inside = {name.lower(): name for name in names}
    train, val = (next((inside[n] for n in known if n in inside), None) for known in (TRAIN_NAMES, VAL_NAMES))
    listed = MultilabelSet(root)
    if train is None:
        if val is not None:
            raise DataError(f"{root} has {val}/ but no train/; give a folder with both, or folders named by labels")
        if len(names) == 1 and any(name.lower() in TRAIN_NAMES for name in folders(root / names[0])):
            raise DataError(f"{root} contains only {names[0]}/, which contains train/; give {root / names[0]}")
        merged = _gather(root, "", None, listed, rest)
    else:
        held = val is not None and any(True for _ in walk(root / val))
        if val is not None and not held:
            listed.warnings.append(f"{val}/ in {root} has no images: a part of {train}/ is held out instead")
        if unused := [name for name in names if name not in (train, val)]:
            listed.notes.append(f"unused folders: {', '.join(map(one_line, unused[:5]))} beside {train}")
        merged = _gather(root, f"{train}/", "train" if held else None, listed, rest)
        if held:
            merged += _gather(root, f"{val}/", "val", listed, rest)
        note_unused(root, "", [name for name in (train, val) if name is not None], rest)
    if not listed.labels:
        raise DataError(f"{root} has no images; give a table of labels (.csv), or folders named by labels")
    labels = {label for own in listed.labels.values() for label in own}
    if bad := next((label for label in natural(labels) if not is_text(label)), None):
        raise DataError(f"{root} has a folder whose name is not UTF-8 text ({bad!a}); rename it")
    if parts := [label for label in natural(labels) if label.lower() in _PARTS]:
        listed.warnings.append(
            f"folders named {', '.join(parts)} are inside label folders and count as labels; a split is "
            "train/LABEL and val/LABEL"
        )
    listed.left = summarize(rest, root, merged)
    return listed


def _gather(root: Path, prefix: str, part: str | None, listed: MultilabelSet, rest: UnusedFiles) -> int:
    """Add the images below a part; byte-identical files of the same name are one image.

    Returns:
        Number of copies whose labels were merged into another file's.
    """
    first: dict[tuple[str, int], list[tuple[str, str | None]]] = {}
    merged = 0
    for file in walk(root / prefix if prefix else root, rest, prefix):
        name, labels = file.name, set(map(class_name, file.name.removeprefix(prefix).split("/")[:-1]))
        like = first.setdefault((os.path.basename(name), file.bytes), [])
        same = None
        if like and file.bytes:
            digest = _digest(root / name)
            like[:] = [(other, known or _digest(root / other)) for other, known in like]
            same = next((other for other, known in like if known == digest), None)
            like.append((name, digest)) if same is None else None
        else:
            like.append((name, None))
        if same is not None:
            listed.labels[same] |= labels
            merged += 1
            continue
        listed.labels[name] = labels
        if part:
            listed.parts[name] = part
    return merged


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return f"unreadable {path}"
