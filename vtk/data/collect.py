"""Gathers a set before anything is decoded: its parts, the images of each class, and what is left out."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vtk.data.layout import Layout, Part, collect, find_layout
from vtk.data.listing import note_rest
from vtk.data.table import TABLES, is_table
from vtk.data.timm_datasets import MARK, is_fetched
from vtk.data.unused_files import LeftOut, Rest, settle
from vtk.errors import DataError


class Gathered(NamedTuple):
    """A set of one label an image.

    Attributes:
        base: folder that names of files start at.
        layout: where the parts are; of a table, both are the table.
        parts: images to train on, and held-out ones.
        left: files that are not used.
        table: that says so, if one does.
        notes: what else the user should know, one sentence each.
    """

    base: Path
    layout: Layout
    parts: tuple[Part, Part]
    left: LeftOut
    notes: tuple[str, ...] = ()
    table: Path | None = None


def gather(root: Path, classes: Sequence[str] | None, *, keep_empty: bool, separator: str | None = None) -> Gathered:
    """Read a table of labels, or walk a folder of class folders; arguments as of `vtk.data.scan`.

    Raises:
        DataError: no layout that is known, a folder that may not be read, or a table that cannot.
    """
    if is_table(root):
        from vtk.data.single_label_table import gather_table

        return gather_table(root, classes, keep_empty=keep_empty, separator=separator)
    try:
        return gather_folder(root, classes, keep_empty=keep_empty)
    except DataError as error:
        tables = [path for end in TABLES for path in sorted(root.glob(f"*{end}"))] if root.is_dir() else []
        if not tables:
            raise
        raise DataError(f"{error}; to read a table of labels give its file, such as {tables[0]}") from error


def gather_folder(root: Path, classes: Sequence[str] | None, *, keep_empty: bool) -> Gathered:
    """Walk a folder of class folders; arguments as of `vtk.data.scan`.

    Raises:
        DataError: no layout that is known, or a folder that may not be read.
    """
    layout, rest = find_layout(root, classes), Rest()
    train, val = (collect(root, part, keep_empty=keep_empty, rest=rest) for part in (layout.train, layout.val))
    if root not in (layout.train, layout.val):
        note_rest(root, "", [part.name for part in (layout.train, layout.val) if part is not None], rest)
    if is_fetched(root):  # with a file of our own beside train/
        rest.others.remove(MARK)
        rest.hidden += 1
    return Gathered(root, layout, (train, val), settle(rest, root))
