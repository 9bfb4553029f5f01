"""Checks of output paths: free, a regular file or a folder, and nothing else."""

import os
import stat
from pathlib import Path

from vtk.errors import DataError

_KINDS = (
    (stat.S_ISBLK, "a block device"), (stat.S_ISCHR, "a device"), (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
)  # fmt: skip
_STREAMS = tuple(map(Path, ("/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd", "/proc")))
_LINKS = 40
HIDDEN = ".vtk-"
"""How the names begin of locks, and of folders in which sets of files are made: they are nobody's results."""


def resolve_output(path: Path, named: str = "") -> Path:
    """Return where a write to ``path`` must go: the path itself, or what a link at its end leads to.

    Args:
        path: to write to; it may be absent.
        named: how the user knows it, for messages; by default the path.

    Raises:
        DataError: a device, pipe, socket, a link to nothing, or a name of an open stream such as ``/dev/stdout``. To
            replace one of these would put a file where other programs expect the node.
    """
    shown, given = named or str(path), path
    for _ in range(_LINKS):
        if any(Path(os.path.abspath(path)).is_relative_to(stream) for stream in _STREAMS):
            raise DataError(f"{shown} is a stream of a running program, not a file; give the name of a file or folder")
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            if path != given:
                raise DataError(f"{shown} is a link to {path}, which is not there; remove the link, or give another"
                                ) from None  # fmt: skip
            return path
        except NotADirectoryError:
            raise DataError(f"{shown}: a part of this path is a file, not a folder; give another path") from None
        except OSError as error:
            raise DataError(f"cannot write {shown}: {error.strerror or error}; choose another folder") from error
        for is_kind, kind in _KINDS:
            if is_kind(mode):
                raise DataError(f"{shown} is {kind}; give the name of a file or folder, or of one that is not there")
        if not stat.S_ISLNK(mode):
            return path
        path = path.parent / os.readlink(path)
    raise DataError(f"{shown} is a link that leads to itself; remove it, or give another")


def check_folder(path: Path, option: str = "`--out`", what: str = "a folder") -> None:
    """Refuse an output folder whose name is taken by something else.

    Raises:
        DataError: says by what.
    """
    if resolve_output(path, f"{option} {path}").is_file():
        raise DataError(f"{option} {path} is a file; give {what}")


def check_file(path: Path, option: str = "`--out`", example: str = "") -> None:
    """Refuse an output file whose name is taken by something else, or whose folder cannot be written to.

    Raises:
        DataError: says why.
    """
    if resolve_output(path, f"{option} {path}").is_dir():
        raise DataError(f"{option} {path} is a folder; give a file{f', such as {path / example}' if example else ''}")
    above = path.absolute().parent
    while not above.exists() and above != above.parent:
        resolve_output(above, f"{option} {path}: {above}")
        above = above.parent
    if not above.is_dir():
        resolve_output(above, f"{option} {path}: {above}")
        raise DataError(f"{option} {path}: {above} is a file, not a folder; give another path")
    if not os.access(above, os.W_OK | os.X_OK):
        raise DataError(f"cannot write {above}: the folder or its disk is read-only; choose another folder")
