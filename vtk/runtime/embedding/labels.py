"""Finds the label of each image: the table's, or the name of its class folder."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from vtk.data.sources.columns import read_lines
from vtk.data.sources.layout import TRAIN_NAMES, VAL_NAMES, class_name, find_layout
from vtk.data.sources.table import is_table
from vtk.errors import DataError

Label = Callable[[Path], str | None]
"""The label of an image; None for an image without one."""
_SEPARATOR = ";"
"""Between several labels, as in tables that `--multi-label` reads."""


def labels_of(images: Path) -> Label:
    """Return a function from a path, as `vtk.data.list_images` lists it, to the label.

    Args:
        images: an image, a folder or a table of labels. In a folder of class folders, or of ``train/`` and ``val/``
            with class folders, the label is the class folder; images elsewhere have none.
    """
    if is_table(images):
        return _of_table(images)
    if not images.is_dir():
        return lambda path: None
    with contextlib.suppress(DataError):
        return _of_folder(images, inner=find_layout(images).train != images)
    return lambda path: None


def _of_folder(root: Path, *, inner: bool) -> Label:
    def label(path: Path) -> str | None:
        parts = path.relative_to(root).parts
        if inner:  # class folders are in those of the parts
            parts = parts[1:] if parts[0].lower() in (*TRAIN_NAMES, *VAL_NAMES) else ()
        return class_name(parts[0]) if len(parts) > 1 else None

    return label


def _of_table(table: Path) -> Label:
    found: dict[Path, list[str]] = {}
    for line in read_lines(table, None, "path,label").lines:
        names = found.setdefault(table.parent / line.name, [])
        names += [name for name in (*line.on, line.label) if name and name not in names]
    return lambda path: _SEPARATOR.join(found.get(path, ())) or None
