"""Atomic writes of files and folders: write to a temporary name, flush, then rename."""

import contextlib
import ctypes
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from safetensors import SafetensorError

from vtk.errors import DataError
from vtk.nodes import HIDDEN, check_folder, resolve_output

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_WRITE_ERRORS = (OSError, SafetensorError, RuntimeError)
_NUMBERS = count(1)


def home() -> Path:
    """Return the toolkit's own folder: ``$VTK_HOME``, by default ``~/.vit-toolkit``. It need not exist."""
    return Path(os.environ.get("VTK_HOME") or "~/.vit-toolkit").expanduser()


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it takes the place of ``path``, on error it is deleted.

    A link to a file stays a link; the file it leads to is replaced.

    Raises:
        DataError: the folder cannot be written, the disk is full, or ``path`` is a device or the like.
    """
    path = resolve_output(path)
    tmp = path.with_name(temporary(path.name))
    try:
        with as_data_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield tmp
            _fsync(tmp)
            resolve_output(path)  # once more: hours may lie between
            os.replace(tmp, path)
            _fsync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            tmp.unlink(missing_ok=True)


@contextlib.contextmanager
def replace_dir(path: Path, *, beside: Path | None = None) -> Iterator[Path]:
    """Yield an empty temporary folder beside ``path``; on success it takes the place of ``path`` as a whole.

    Where the system can exchange two names at once (Linux), ``path`` names either the old or the new folder at every
    moment. Elsewhere the old one is first moved to a hidden name beside it, which `existing_dir` falls back to.

    Args:
        path: the folder, or a link to it.
        beside: folder of the temporary names, on the same file system, where nothing else may stand beside ``path``.

    Raises:
        DataError: the folder cannot be written, the disk is full, or ``path`` is a device or the like.
    """
    path = resolve_output(path)
    tmp = (beside or path.parent) / temporary(path.name)
    old = (beside or path.parent) / _old_name(path.name)
    try:
        with as_data_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            tmp.mkdir()
            yield tmp
            flush(tmp)
            resolve_output(path)
            if not path.exists():
                os.replace(tmp, path)
            elif not exchange(tmp, path):
                shutil.rmtree(old, ignore_errors=True)
                os.replace(path, old)
                os.replace(tmp, path)
            shutil.rmtree(old, ignore_errors=True)
            _fsync(path.parent)
    finally:
        remove_tree(tmp)


@contextlib.contextmanager
def as_data_error(path: Path) -> Iterator[None]:
    """Turn a failed write inside the context into one line: the path, the reason, what to do.

    Raises:
        DataError: ``path`` cannot be written, or the disk is full.
    """
    try:
        yield
    except _WRITE_ERRORS as error:
        if (reason := _write_failure(error)) is None:
            raise
        raise DataError(f"cannot write {path}: {reason}") from error


def remove_tree(folder: Path) -> None:
    """Delete a folder if it is there; tried twice, as an operation of a failing disk may fail once."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def temporary(name: str) -> str:
    """Return a temporary name that is unique on this machine."""
    return f"{name}.tmp-{os.getpid()}-{next(_NUMBERS)}"


def flush(folder: Path) -> None:
    """Flush a folder and everything in it to the disk."""
    for file in sorted(folder.rglob("*"), reverse=True):
        _fsync(file)
    _fsync(folder)


def flush_names(*folders: Path) -> None:
    """Flush the entries of folders to the disk, after files were moved."""
    for folder in folders:
        _fsync(folder)


def _old_name(name: str) -> str:
    """Return the hidden name of a folder while it is being replaced."""
    return f".{name}.vtk-old"


def existing_dir(path: Path) -> Path:
    """Return ``path``, or the folder with its contents if a writer was stopped between its two renames.

    Version 0.1 moved them to ``path.old``.
    """
    if path.exists():
        return path
    return next((old for old in old_places(path) if old.is_dir()), path)


def old_places(path: Path) -> tuple[Path, Path]:
    """Return the names under which a replaced folder may remain: of this version, and of 0.1."""
    return path.with_name(_old_name(path.name)), path.with_name(f"{path.name}.old")


def sweep(folder: Path, own: Callable[[str], bool], *, age: float = 0.0) -> None:
    """Delete temporary files and folders of killed writers.

    Args:
        folder: that they wrote to.
        own: tells whether a name was one to be written there, so that nothing of a stranger is touched.
        age: seconds since the last change below which nothing is deleted: the writer may be on another machine, where
            its number is not known to be alive.
    """
    import psutil

    for left in folder.glob("*.tmp-*"):
        name, _, pid = left.name.rpartition(".tmp-")
        pid = pid.partition("-")[0]
        if not own(name) or not pid.isdecimal() or psutil.pid_exists(int(pid)):
            continue
        with contextlib.suppress(OSError):  # another process sweeps, too
            if time.time() - left.stat().st_mtime < age:
                continue
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, whole or not at all."""
    with replace_file(path) as tmp:
        tmp.write_text(text, encoding="utf-8", errors="surrogateescape", newline="\n")


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data``, whole or not at all."""
    with replace_file(path) as tmp:
        tmp.write_bytes(data)


def prepare_output(path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
    """Check that results can go to ``path`` without mixing with other files.

    `vtk.filesets.open_folder` does so and more: it keeps other writers away.

    Raises:
        DataError: ``path`` is a file or a device, a folder that is not empty and neither flag was given, or cannot be
            written.
    """
    check_folder(path)
    try:
        if path.is_dir() and any(not n.startswith(HIDDEN) for n in os.listdir(path)) and not (overwrite or resume):
            raise DataError(f"`--out` {path} is not empty; give another folder, or --overwrite")
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot make the folder {path}: {error.strerror or error}") from error
    check_writable(path)


def check_writable(folder: Path) -> None:
    """Refuse a folder that is read-only, before hours of work whose results could not be kept.

    Raises:
        DataError: it, or the disk it is on, is read-only.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DataError(f"cannot write {folder}: the folder or its disk is read-only; choose another folder")


def _write_failure(error: Exception) -> str | None:
    """Return why a file could not be written, and what to do; None if something else failed.

    safetensors and torch.save raise kinds of their own on a full disk.
    """
    text = " ".join(str(error).split())
    if isinstance(error, SafetensorError):
        if "I/O error" not in text:
            return None
        reason = text.rpartition("I/O error: ")[2].partition(" (os error")[0]
    elif isinstance(error, OSError):
        reason = error.strerror or text
    elif "PytorchStreamWriter" in text or "unexpected pos" in text:
        reason = "the disk is full or went away"
    else:
        return None
    readonly = reason in [os.strerror(number) for number in (errno.EROFS, errno.EACCES, errno.EPERM)]
    return f"{reason}; {'' if readonly else 'free some space or '}choose another folder"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


_MODE = 0o666 & ~_umask()


def _fsync(path: Path) -> None:
    """Flush a file or folder to the disk, files readable as the user's umask says (safetensors makes them private).

    Windows cannot open folders, so there it is left to the system.
    """
    if path.is_dir():
        if os.name == "nt":
            return
    else:
        path.chmod(_MODE)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0
