"""Files that are either whole or absent: write to a temporary name, flush, then rename."""

import contextlib
import ctypes
import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from vtk.errors import DataError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_WRITE_ERRORS = (OSError, SafetensorError, RuntimeError)


def home() -> Path:
    """Return the toolkit's own folder: ``$VTK_HOME``, by default ``~/.vit-toolkit``. It need not exist."""
    return Path(os.environ.get("VTK_HOME") or "~/.vit-toolkit").expanduser()


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it takes the place of ``path``, on error it is deleted.

    Raises:
        DataError: the folder cannot be written or the disk is full.
    """
    tmp = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield tmp
        _fsync(tmp)
        os.replace(tmp, path)
        _fsync(path.parent)
    except _WRITE_ERRORS as error:
        if (reason := _write_failure(error)) is None:
            raise
        raise DataError(f"cannot write {path}: {reason}") from error
    finally:
        with contextlib.suppress(OSError):
            tmp.unlink(missing_ok=True)


@contextlib.contextmanager
def replace_dir(path: Path, *, beside: Path | None = None) -> Iterator[Path]:
    """Yield an empty temporary folder beside ``path``; on success it takes the place of ``path`` as a whole.

    Where the system can exchange two names at once (Linux), ``path`` names either the old or the new folder at every
    moment. Elsewhere the old one is first moved to ``path.old``, which `existing_dir` falls back to.

    Args:
        path: the folder.
        beside: folder of the temporary names, on the same file system, where nothing else may stand beside ``path``.

    Raises:
        DataError: the folder cannot be written or the disk is full.
    """
    tmp = (beside or path.parent) / f"{path.name}.tmp-{os.getpid()}"
    old = (beside or path.parent) / f"{path.name}.old"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if tmp.exists():
            shutil.rmtree(tmp)
        tmp.mkdir()
        yield tmp
        for file in sorted(tmp.rglob("*"), reverse=True):
            _fsync(file)
        _fsync(tmp)
        if not path.exists():
            os.replace(tmp, path)
            shutil.rmtree(old, ignore_errors=True)
        elif not _exchange(tmp, path):
            shutil.rmtree(old, ignore_errors=True)
            os.replace(path, old)
            os.replace(tmp, path)
            shutil.rmtree(old, ignore_errors=True)
        _fsync(path.parent)
    except _WRITE_ERRORS as error:
        if (reason := _write_failure(error)) is None:
            raise
        raise DataError(f"cannot write {path}: {reason}") from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def existing_dir(path: Path) -> Path:
    """Return ``path``, or ``path.old`` when a writer was stopped between its two renames."""
    old = path.with_name(f"{path.name}.old")
    return old if not path.exists() and old.is_dir() else path


def sweep(folder: Path, own: Callable[[str], bool], *, age: float = 0.0) -> None:
    """Delete the temporary files and folders of writers that were killed.

    Args:
        folder: that they wrote to.
        own: tells whether a name was one to be written there, so that nothing of a stranger is touched.
        age: seconds since the last change below which nothing is deleted: the writer may be on another machine, where
            its number is not known to be alive.
    """
    import psutil

    for left in folder.glob("*.tmp-*"):
        name, _, pid = left.name.rpartition(".tmp-")
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


def prepare_output(path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
    """Make sure that results can go to ``path`` without mixing with something else.

    Raises:
        DataError: ``path`` is a file, a folder that is not empty and neither flag was given, or cannot be written.
    """
    if path.exists() and not path.is_dir():
        raise DataError(f"`--out` {path} is a file; give a folder")
    try:
        if path.is_dir() and any(path.iterdir()) and not (overwrite or resume):
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
    """Return why a file could not be written, and what to do; None if that was not what failed.

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


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0
