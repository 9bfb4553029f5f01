"""Standard streams that are closed, full, or pipes whose reader has gone."""

import contextlib
import errno
import os
import sys

_FULL = tuple(getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EIO") if hasattr(errno, name))


def open_closed() -> bool:
    """Open the null device for each closed standard stream; otherwise the next opened file would become that stream.

    Returns:
        Whether standard output was closed.
    """
    closed = sys.stdout is None
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        if (opened := os.open(os.devnull, os.O_RDWR)) != number:
            os.dup2(opened, number)
            os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))
    return closed


def is_full(error: OSError) -> bool:
    """Return whether an error is of a stream on a full device; errors of files have a file name."""
    return error.filename is None and error.errno in _FULL


def discard_unwritten() -> None:
    """Discard unwritten standard output and error if they cannot be written: Python would try again at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)


def say_error(line: str) -> None:
    """Print a line on standard error; a closed stream changes no exit code."""
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard_unwritten()
