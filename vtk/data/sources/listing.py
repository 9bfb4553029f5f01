"""Lists the images of a folder, and its sub-folders that the user means rather than a program left."""

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from vtk.data.decoding.images import SUFFIXES
from vtk.data.sources.unused_files import Rest, files_below
from vtk.errors import DataError

_JUNK = frozenset(
    {"__macosx", "__pycache__", "$recycle.bin", "system volume information", "@eadir", "lost+found"}
    | {"thumbs.db", "desktop.ini"}
)


class Found(NamedTuple):
    """An image file: its path below the folder that was walked (with ``/``), size and times of last change.

    ``ctime_ns`` moves with every change of the content, also by a program that sets ``mtime_ns`` back.
    """

    name: str
    bytes: int
    mtime_ns: int
    ctime_ns: int


def natural(names: Iterable[str]) -> list[str]:
    """Sort as a person would: class2 before class10, upper and lower case together."""
    # here: machines that only run models, and their tests, need not have it
    from natsort import natsort_keygen, ns

    key = natsort_keygen(alg=ns.INT | ns.IGNORECASE)
    return sorted(names, key=lambda name: (key(name), name))


def is_hidden(name: str) -> bool:
    """Tell whether a file or folder was made by a program: ``.git``, ``._x.jpg``, ``__MACOSX`` and the like."""
    return name.startswith(".") or name.lower() in _JUNK


def is_image(name: str) -> bool:
    """Tell by its name whether a file should be an image."""
    return not is_hidden(name) and _has_suffix(name)


def _has_suffix(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


def folders(root: Path) -> list[str]:
    """Return the names of the visible sub-folders of ``root``, links to folders included, naturally sorted.

    Raises:
        DataError: ``root`` is absent, not a folder, or may not be read.
    """
    return natural(entry.name for entry in _entries(root) if _is_dir(entry) and not is_hidden(entry.name))


def loose_images(root: Path) -> int:
    """Count the image files that lie directly in ``root``."""
    return sum(is_image(entry.name) and os.path.isfile(entry.path) for entry in _entries(root))


def walk(root: Path, rest: Rest | None = None, prefix: str = "") -> Iterator[Found]:
    """Yield every image file below ``root``, at any depth, sorted by name; links are followed, circles are not.

    Args:
        root: the folder.
        rest: is told of everything else that is found.
        prefix: before the names of what is yielded and told.

    Raises:
        DataError: a folder may not be read.
    """
    yield from _walk(str(root), prefix, (), rest)


def note_rest(folder: Path, prefix: str, known: Collection[str], rest: Rest) -> None:
    """Tell ``rest`` of what lies in a folder beside the sub-folders that are used, whose names are ``known``."""
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


def stat_file(root: Path, name: str) -> Found:
    """Return a file that a table names; what is not there is a bad file like any other."""
    try:
        info = os.stat(root / name)
        return Found(name, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
    except (OSError, ValueError):
        return Found(name, 0, 0, 0)


def _walk(folder: str, prefix: str, above: tuple[tuple[int, int], ...], rest: Rest | None) -> Iterator[Found]:
    entries = sorted(_entries(Path(folder)), key=lambda entry: entry.name)
    here = os.stat(folder)
    key = here.st_dev, here.st_ino
    if key in above:  # a link to one of its own parents
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
                    yield Found(prefix + entry.name, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
                elif rest is not None:
                    rest.special.append(prefix + entry.name)
            elif rest is not None:
                rest.others.append(prefix + entry.name)
        except OSError:  # a dangling or circular link, or deleted while walking: it is an image that cannot be read
            if is_image(entry.name):
                yield Found(prefix + entry.name, 0, 0, 0)


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
