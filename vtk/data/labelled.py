"""Which images a multi-label set has, and their labels: from a CSV file, or from the folders above each image.

The CSV file has a line ``path,label1;label2`` for each image and may have a third column, ``train`` or ``val``. Paths
start at the file's folder; a first line that names the columns is left out. In folders an image may lie at any depth
(``beach/dog/1.jpg`` is both), and a file of the same name and bytes in several folders is one image with all their
labels; files directly in the folder have no label.
"""

import csv
import hashlib
import os
import posixpath
from dataclasses import dataclass, field
from pathlib import Path

from vtk.data.images import one_line
from vtk.data.layout import TRAIN_NAMES, VAL_NAMES, class_name, is_text
from vtk.data.listing import folders, natural, note_rest, walk
from vtk.data.rest import LeftOut, Rest, settle
from vtk.errors import DataError

_HEADS = ("path", "image", "file", "filename", "image_path", "file_name")
_PARTS = {**dict.fromkeys(TRAIN_NAMES, "train"), **dict.fromkeys(VAL_NAMES, "val")}


@dataclass
class Listed:
    """Images of a set.

    Attributes:
        root: folder that names start at.
        labels: of each image, by name.
        parts: ``train`` or ``val`` where the set itself says so; empty where it does not.
        notes: what the user should know, one sentence each.
        warnings: what is probably not meant.
        left: files that are not used.
    """

    root: Path
    labels: dict[str, set[str]] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    left: LeftOut = field(default_factory=LeftOut)


def list_labelled(root: Path) -> Listed:
    """Return the images of a table, of a folder that holds ``labels.csv``, or of folders named by labels.

    Raises:
        DataError: there are none, a line cannot be read, a label is no text, or a part is where a label should be.
    """
    table = root if root.suffix.lower() == ".csv" else root / "labels.csv"
    return _read_csv(table) if table.is_file() or table == root else _read_folders(root)


def _read_csv(table: Path) -> Listed:
    listed = Listed(table.parent)
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            lines = [(number, row) for number, row in enumerate(csv.reader(file), 1) if any(map(str.strip, row))]
    except UnicodeDecodeError as error:
        raise DataError(f"{table} is not UTF-8 text (byte {error.start}); save the table as UTF-8") from error
    except (OSError, csv.Error) as error:
        raise DataError(f"cannot read {table} as a table of labels: {error}") from error
    if lines and lines[0][1][0].strip().lower() in _HEADS:
        lines = lines[1:]
    for number, row in lines:
        name, labels, part = (*(cell.strip() for cell in row[:3]), "", "")[:3]
        if not name or "\0" in name or len(row) not in (2, 3) or (part and part.lower() not in _PARTS):
            raise DataError(
                f"{table} line {number} is {','.join(row)[:60]!r}; write path,label1;label2 or path,label1;label2,val"
            )
        if "\\" in name and not (table.parent / name).exists():
            name = name.replace("\\", "/")  # of a table that was made on Windows
        name = posixpath.normpath(name)  # ./a.jpg and a.jpg are one image
        listed.labels.setdefault(name, set()).update(map(class_name, filter(None, map(str.strip, labels.split(";")))))
        if part and listed.parts.setdefault(name, _PARTS[part.lower()]) != _PARTS[part.lower()]:
            raise DataError(f"{table} line {number} puts {one_line(name)} into {part}, an earlier line does not")
    if not listed.labels:
        raise DataError(f"{table} names no images; write lines path,label1;label2")
    if listed.parts and "val" not in listed.parts.values():
        listed.notes.append(f"{table.name} puts no image into val: a part is held out")
        listed.parts.clear()
    elif listed.parts and (rest := len(listed.labels) - len(listed.parts)):
        listed.notes.append(f"images of {table.name} that are in no part count as train: {rest}")
    return listed


def _read_folders(root: Path) -> Listed:
    names, rest, merged = folders(root), Rest(), 0
    inside = {name.lower(): name for name in names}
    train, val = (next((inside[n] for n in known if n in inside), None) for known in (TRAIN_NAMES, VAL_NAMES))
    listed = Listed(root)
    if train is None:
        if val is not None:
            raise DataError(f"{root} has {val}/ but no train/; give a folder with both, or folders named by labels")
        if len(names) == 1 and any(name.lower() in TRAIN_NAMES for name in folders(root / names[0])):
            raise DataError(f"{root} holds {names[0]}/ only, and that train/; give {root / names[0]}")
        merged = _gather(root, "", None, listed, rest)
    else:
        held = val is not None and any(True for _ in walk(root / val))
        if val is not None and not held:
            listed.warnings.append(f"{val}/ in {root} has no images: a part of {train}/ is held out in place of it")
        if unused := [name for name in names if name not in (train, val)]:
            listed.notes.append(f"not used: {', '.join(map(one_line, unused[:5]))} beside {train}")
        merged = _gather(root, f"{train}/", "train" if held else None, listed, rest)
        if held:
            merged += _gather(root, f"{val}/", "val", listed, rest)
        note_rest(root, "", [name for name in (train, val) if name is not None], rest)
    if not listed.labels:
        raise DataError(f"{root} has no images; give a table of labels (.csv), or folders named by labels")
    labels = {label for own in listed.labels.values() for label in own}
    if bad := next((label for label in natural(labels) if not is_text(label)), None):
        raise DataError(f"{root} has a folder whose name is not UTF-8 text ({bad!a}); rename it")
    if parts := [label for label in natural(labels) if label.lower() in _PARTS]:
        listed.warnings.append(
            f"folders named {', '.join(parts)} lie inside and are labels; a split is train/LABEL and val/LABEL"
        )
    listed.left = settle(rest, root, merged)
    return listed


def _gather(root: Path, prefix: str, part: str | None, listed: Listed, rest: Rest) -> int:
    """Add the images below a part; files of one name and size are one image if their bytes are the same.

    Returns:
        How many files are copies whose labels were added to another one's.
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
