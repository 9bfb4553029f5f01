"""Lists the images and visible sub-folders of a folder."""

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from vtk.data.decoding.images import SUFFIXES
from vtk.data.sources.unused_files import UnusedFiles, files_below
from vtk.errors import DataError

_JUNK = frozenset(
    {"__macosx", "__pycache__", "$recycle.bin", "system volume information", "@eadir", "lost+found"}
    | {"thumbs.db", "desktop.ini"}
)


class ImageFile(NamedTuple):
    """An image file: its path relative to the walked folder (with ``/``), size and times of last change.

    ``ctime_ns`` changes with the content even if a program resets ``mtime_ns``.
    """

    name: str
    bytes: int
    mtime_ns: int
    ctime_ns: int


def natural(names: Iterable[str]) -> list[str]:
    """Sort naturally: class2 before class10, case-insensitively."""
    # imported here: not installed where models only run
    from natsort import natsort_keygen, ns

    key = natsort_keygen(alg=ns.INT | ns.IGNORECASE)
    return sorted(names, key=lambda name: (key(name), name))


def is_hidden(name: str) -> bool:
    """Return whether a name is hidden or a system's: ``.git``, ``._x.jpg``, ``__MACOSX`` and similar."""
    return name.startswith(".") or name.lower() in _JUNK


def is_image(name: str) -> bool:
    """Return whether a file's name has an image suffix and is not hidden."""
    return not is_hidden(name) and _has_suffix(name)


def _has_suffix(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def folders(root: Path) -> list[str]:
    """Return the names of the visible sub-folders of ``root``, including links to folders, naturally sorted.

    Raises:
        DataError: ``root`` is absent, not a folder, or unreadable.
    """
    return natural(entry.name for entry in _entries(root) if _is_dir(entry) and not is_hidden(entry.name))


def loose_images(root: Path) -> int:
    """Return the number of image files directly in ``root``."""
    return sum(is_image(entry.name) and os.path.isfile(entry.path) for entry in _entries(root))


def walk(root: Path, rest: UnusedFiles | None = None, prefix: str = "") -> Iterator[ImageFile]:
    """Yield every image file below ``root``, at any depth, sorted by name; links are followed, except cycles.

    Args:
        root: the folder.
        rest: records all other files.
        prefix: before the names of yielded and recorded files.

    Raises:
        DataError: an unreadable folder.
    """
    yield from _walk(str(root), prefix, (), rest)


def note_unused(folder: Path, prefix: str, known: Collection[str], rest: UnusedFiles) -> None:
    """Record in ``rest`` all entries of a folder except the used sub-folders, ``known``."""
    for entry in sorted(_entries(folder), key=lambda entry: entry.name):
        name = prefix + entry.name
        if is_hidden(entry.name):
            rest.count_hidden(entry.path, _is_dir(entry))
        elif _is_dir(entry):
            if entry.name not in known:
                rest.unused[name] = files_below(entry.path)
            elif entry.is_symlink():
                rest.links.append(name)
        else:
            (rest.loose if is_image(entry.name) else rest.others).append(name)


def stat_file(root: Path, name: str) -> ImageFile:
    """Return a file that a table names; a missing file has size 0 and is unreadable like any other bad file."""
    try:
        info = os.stat(root / name)
        return ImageFile(name, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
    except (OSError, ValueError):
        return ImageFile(name, 0, 0, 0)


def _walk(
    folder: str, prefix: str, above: tuple[tuple[int, int], ...], rest: UnusedFiles | None
) -> Iterator[ImageFile]:
    entries = sorted(_entries(Path(folder)), key=lambda entry: entry.name)
    here = os.stat(folder)
    key = here.st_dev, here.st_ino
    if key in above:  # a link to a parent folder
        return
    for entry in entries:
        if is_hidden(entry.name):
            if rest is not None:
                rest.count_hidden(entry.path, _is_dir(entry))
            continue
        try:
            if _is_dir(entry):
                if rest is not None and entry.is_symlink():
                    rest.links.append(prefix + entry.name)
                yield from _walk(entry.path, f"{prefix}{entry.name}/", (*above, key), rest)
            elif _has_suffix(entry.name):
                info = entry.stat()
                if stat.S_ISREG(info.st_mode):
                    yield ImageFile(prefix + entry.name, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
                elif rest is not None:
                    rest.special.append(prefix + entry.name)
            elif rest is not None:
                rest.others.append(prefix + entry.name)
        except OSError:  # a broken or circular link, or deleted during the walk: an unreadable image
            if is_image(entry.name):
                yield ImageFile(prefix + entry.name, 0, 0, 0)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        raise DataError(f"{folder} does not exist; give a folder of images") from None
    except NotADirectoryError:
        raise DataError(
            f"{folder} is a file; give a folder with one sub-folder per class, or a table (.csv, .tsv, .parquet)"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {error.strerror or error}") from error
