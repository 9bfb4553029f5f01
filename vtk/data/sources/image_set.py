"""Lists the images of a single-label set, by part and class, without decoding them."""

from collections.abc import Sequence
from pathlib import Path

from vtk.data.decoding.images import SUFFIXES
from vtk.data.sources.columns import read_lines
from vtk.data.sources.layout import ImageSet, find_layout, list_part
from vtk.data.sources.listing import natural, note_unused, walk
from vtk.data.sources.single_label_table import read_label_table
from vtk.data.sources.table import TABLES, is_table
from vtk.data.sources.timm_datasets import MARK, is_fetched
from vtk.data.sources.unused_files import UnusedFiles, summarize
from vtk.errors import DataError


def read_image_set(
    root: Path, classes: Sequence[str] | None, *, keep_empty: bool, separator: str | None = None
) -> ImageSet:
    """Read a table of labels, or walk a folder of class folders; arguments as of `vtk.data.scan`.

    Raises:
        DataError: unknown layout, or an unreadable folder or table.
    """
    if is_table(root):
        return read_label_table(root, classes, keep_empty=keep_empty, separator=separator)
    try:
        return read_folder(root, classes, keep_empty=keep_empty)
    except DataError as error:
        tables = [path for end in TABLES for path in sorted(root.glob(f"*{end}"))] if root.is_dir() else []
        if not tables:
            raise
        raise DataError(f"{error}; to use a table of labels give its file, such as {tables[0]}") from error


def read_folder(root: Path, classes: Sequence[str] | None, *, keep_empty: bool) -> ImageSet:
    """Walk a folder of class folders; arguments as of `vtk.data.scan`.

    Raises:
        DataError: unknown layout, or an unreadable folder.
    """
    layout, rest = find_layout(root, classes), UnusedFiles()
    train, val = (list_part(root, part, keep_empty=keep_empty, rest=rest) for part in (layout.train, layout.val))
    if root not in (layout.train, layout.val):
        note_unused(root, "", [part.name for part in (layout.train, layout.val) if part is not None], rest)
    if is_fetched(root):  # it has a marker file beside train/
        rest.others.remove(MARK)
        rest.hidden += 1
    return ImageSet(root, layout, (train, val), summarize(rest, root))


def list_images(path: Path) -> list[Path]:
    """Return the image files of a folder, at any depth and naturally sorted; or ``path`` itself if it is a file.

    A file given directly is returned whatever its suffix; decoding shows whether it is an image. Of a table of labels,
    the images that it names are returned.

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
