"""Locks on output folders: one writer at a time, held by the operating system while the process lives.

The lock is that of an open file, ``.vtk-lock`` in the folder, whose contents tell people who holds it. What a killed
process leaves is only the file: nobody holds its lock, so the next writer takes it over.
"""

import contextlib
import datetime
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vtk.errors import DataError, HeldError
from vtk.nodes import check_folder, resolve_output

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".vtk-lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of file systems that have no locks: some shared ones, as they are mounted."""
_BUSY = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
_FAR = 1 << 30
"""Offset of the byte that Windows locks: readers of the file must not meet it."""
_guard = threading.Lock()
_held: dict[tuple[int, int], int] = {}
"""Lock files of this process by device and number, with descriptors: some systems give one process a lock twice."""


@dataclass(frozen=True)
class Holder:
    """The writer of a folder, as its lock file names it.

    Attributes:
        command: what was started.
        pid: its process.
        host: on which machine.
        since: when it began, UTC.
        started: when the process began, in seconds since 1970; 0 if not known.
    """

    command: str
    pid: int
    host: str
    since: str
    started: float = 0.0

    @property
    def alive(self) -> bool:
        """Whether the process may be there; of other machines nobody knows."""
        import psutil

        if self.host != socket.gethostname():
            return True
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 2 or not self.started
        except psutil.NoSuchProcess:
            return False
        except psutil.Error:
            return True

    def __str__(self) -> str:
        here = " (this process)" if (self.pid, self.host) == (os.getpid(), socket.gethostname()) else ""
        return f"`{self.command}`, process {self.pid}{here} on {self.host}, since {self.since}"


@contextlib.contextmanager
def hold_folder(out: Path, command: str, option: str = "`--out`") -> Iterator[None]:
    """Keep every other writer away from a folder while the context is open; made if absent, and removed if left empty.

    Args:
        out: the folder, or a link to it.
        command: what writes, for those who are refused.
        option: that named the folder, for messages.

    Raises:
        DataError: somebody else writes there, or it cannot be a folder that is written to.
    """
    check_folder(out, option)
    made = _make(out)
    try:
        with _hold(out / LOCK, command, f"{option} {out}"):
            yield
    finally:
        for folder in made:  # from the inside out, as far as nothing was put there
            with contextlib.suppress(OSError):
                folder.rmdir()


@contextlib.contextmanager
def hold_name(out: Path, command: str, option: str = "`--out`") -> Iterator[None]:
    """Keep other writers away from a folder that is replaced as a whole: the lock lies beside it.

    Raises:
        DataError: somebody else writes it, or it cannot be written.
    """
    place = resolve_output(out, f"{option} {out}")
    made = _make(place.parent)
    try:
        with _hold(place.with_name(f".{place.name}{LOCK}"), command, f"{option} {out}"):
            yield
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _make(out: Path) -> list[Path]:
    """Make a folder with those above it, and return which were made, the innermost first."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot make the folder {out}: {error.strerror or error}") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise DataError(f"cannot write {out}: the folder or its disk is read-only; choose another folder")
    return made


@contextlib.contextmanager
def _hold(file: Path, command: str, shown: str) -> Iterator[None]:
    descriptor, release = _acquire(file, shown)
    key, owner = _key(os.fstat(descriptor)), os.getpid()
    try:
        _tell(descriptor, command)
        yield
    finally:
        if os.getpid() == owner:  # not in a forked process that unwinds the same frames
            _release(file, key, descriptor, release)


def _release(file: Path, key: tuple[int, int], descriptor: int, release: Callable[[], None]) -> None:
    with contextlib.ExitStack() as last:
        if os.name == "nt":  # which removes no file that is open
            last.callback(file.unlink, missing_ok=True)
        with contextlib.suppress(OSError):  # while it is held: the next one finds either this file or none
            file.unlink()
        with _guard:
            _held.pop(key, None)
        release()
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _acquire(file: Path, shown: str) -> tuple[int, Callable[[], None]]:
    """Open and lock a file.

    Returns:
        Its descriptor, and what lets go of the lock.
    """
    resolve_output(file)
    while True:
        descriptor = _open(file)
        try:
            key = _key(os.fstat(descriptor))
            with _guard:
                release = None if key in _held else _lock(descriptor)
                if release is not None and _same_file(descriptor, file):
                    _held[key] = descriptor
                    return descriptor, release
            if release is None:
                raise HeldError(f"{shown} is being written by {_who(file)}; wait until it ends, or give another folder")
            release()  # the one before took its file away meanwhile
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _open(file: Path) -> int:
    try:
        with contextlib.suppress(FileNotFoundError):
            return os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        _make(file.parent)  # who held it before has taken the empty folder away
        return os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        with contextlib.suppress(OSError):  # what another user's killed process left, in a folder that both may write
            descriptor = os.open(file, os.O_RDONLY)
            try:
                if _lock(descriptor) is not None:
                    file.unlink()
                    return os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
                return os.dup(descriptor)  # which will be found locked
            finally:
                os.close(descriptor)
        raise DataError(f"cannot write {file}: the folder is read-only; choose another folder") from None
    except OSError as error:
        raise DataError(f"cannot write {file}: {error.strerror or error}; choose another folder") from error


def _lock(descriptor: int) -> Callable[[], None] | None:
    """Take the lock of an open file without waiting; None if somebody else has it."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lambda: fcntl.flock(descriptor, fcntl.LOCK_UN)
        return _lock_windows(descriptor)
    except OSError as error:
        if error.errno in _BUSY:
            return None
        if error.errno not in _NO_LOCKS:
            raise DataError(f"cannot lock the folder: {error.strerror or error}; choose another folder") from error
    holder = _read(descriptor)  # without locks, the contents must do
    return None if holder is not None and holder.alive else lambda: None


def _lock_windows(descriptor: int) -> Callable[[], None]:
    import msvcrt

    def at(mode: str) -> None:
        os.lseek(descriptor, _FAR, os.SEEK_SET)
        msvcrt.locking(descriptor, getattr(msvcrt, mode), 1)  # type: ignore[attr-defined]

    at("LK_NBLCK")
    return lambda: at("LK_UNLCK")


def _tell(descriptor: int, command: str) -> None:
    import psutil

    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    short = command if len(command) <= 80 else f"{command[:79]}…"
    holder = Holder(short, os.getpid(), socket.gethostname(), now, psutil.Process().create_time())
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    with contextlib.suppress(OSError):  # of a full disk: the lock holds all the same
        os.write(descriptor, json.dumps(asdict(holder)).encode())


def _who(file: Path) -> str:
    for _ in range(20):  # who has just taken it writes in a moment
        with contextlib.suppress(OSError):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                if (holder := _read(descriptor)) is not None:
                    return str(holder)
            finally:
                os.close(descriptor)
        time.sleep(0.02)
    return "another process"


def _read(descriptor: int) -> Holder | None:
    os.lseek(descriptor, 0, os.SEEK_SET)
    try:
        found: Any = json.loads(os.read(descriptor, 4096))
        text = {name: " ".join(str(found[name]).split())[:100] for name in ("command", "host", "since")}
        return Holder(**text, pid=int(found["pid"]), started=float(found.get("started", 0.0)))
    except Exception:  # whatever is in a file that anybody may write
        return None


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _same_file(descriptor: int, file: Path) -> bool:
    try:
        return _key(os.fstat(descriptor)) == _key(file.stat())
    except OSError:
        return False


def _close_in_child() -> None:
    """Let go of the locks' files in a forked process: one that outlives a killed parent would keep the lock."""
    global _guard
    _guard = threading.Lock()
    for descriptor in _held.values():
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
