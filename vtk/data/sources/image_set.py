"""Gathers a set before anything is decoded: its parts, the images of each class, and what is left out."""

from collections.abc import Sequence
from pathlib import Path

from vtk.data.decoding.images import SUFFIXES
from vtk.data.sources.columns import read_lines
from vtk.data.sources.layout import ImageSet, collect, find_layout
from vtk.data.sources.listing import natural, note_rest, walk
from vtk.data.sources.single_label_table import gather_table
from vtk.data.sources.table import TABLES, is_table
from vtk.data.sources.timm_datasets import MARK, is_fetched
from vtk.data.sources.unused_files import Rest, settle
from vtk.errors import DataError


def gather(root: Path, classes: Sequence[str] | None, *, keep_empty: bool, separator: str | None = None) -> ImageSet:
    """Read a table of labels, or walk a folder of class folders; arguments as of `vtk.data.scan`.

    Raises:
        DataError: no layout that is known, a folder that may not be read, or a table that cannot.
    """
    if is_table(root):
        return gather_table(root, classes, keep_empty=keep_empty, separator=separator)
    try:
        return gather_folder(root, classes, keep_empty=keep_empty)
    except DataError as error:
        tables = [path for end in TABLES for path in sorted(root.glob(f"*{end}"))] if root.is_dir() else []
        if not tables:
            raise
        raise DataError(f"{error}; to read a table of labels give its file, such as {tables[0]}") from error


def gather_folder(root: Path, classes: Sequence[str] | None, *, keep_empty: bool) -> ImageSet:
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
    return ImageSet(root, layout, (train, val), settle(rest, root))


def list_images(path: Path) -> list[Path]:
    """Return the image files of a folder, at any depth and naturally sorted; or ``path`` itself if it is a file.

    A file given by name is returned whatever it is called; it shows on decoding whether it is an image. Of a table of
    labels, the images that it names are returned.

    Raises:
        DataError: the path is absent or has no images.
    """
    path = Path(path)
    if is_table(path):
        return [
            path.parent / name for name in natural({line.name for line in read_lines(path, None, "path,label").lines})
        ]
    if path.is_file():
        return [path]
    found = [path / name for name in natural(image.name for image in walk(path))]
    if not found:
        raise DataError(f"{path} has no images; give a file or a folder with {', '.join(sorted(SUFFIXES)[:6])} … files")
    return found
