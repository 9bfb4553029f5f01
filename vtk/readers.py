"""Error boundary for readers of foreign files: whatever a parser raises becomes one line that says what to do.

Parsers of damaged files raise nearly anything, so no list of exceptions is complete. Each reader runs its parser inside
`reading`, and then checks the result.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from vtk.errors import DataError, VtkError
from vtk.text import printable

_LONGEST = 160
_PANIC = "pyo3_runtime"
"""Module of the error by which a parser written in Rust says that it gave up; it is no `Exception`."""


@contextlib.contextmanager
def reading(
    where: str | os.PathLike[str],
    fault: str,
    advice: str = "was it damaged or cut short?",
    error: type[VtkError] = DataError,
) -> Iterator[None]:
    """Turn what a parser raises inside the context into one line; this toolkit's own errors pass as they are.

    Args:
        where: the file, or words for what is read.
        fault: of it, such as ``is not a whole ONNX file``.
        advice: for people, after the reason.
        error: kind to raise.

    Raises:
        DataError: or ``error``: the parser failed, ran out of memory or recursed too deeply.
    """
    try:
        yield
    except VtkError:
        raise
    except MemoryError as failure:
        raise error(f"there is not enough memory to read {_shown(where)}; {advice}") from failure
    except OSError as failure:
        if failure.errno is None:
            raise error(f"{_shown(where)} {fault} ({short(failure)}); {advice}") from failure
        raise error(f"cannot read {_shown(where)}: {failure.strerror or short(failure)}") from failure
    except Exception as failure:
        raise error(f"{_shown(where)} {fault} ({short(failure)}); {advice}") from failure
    except BaseException as failure:
        if type(failure).__module__ != _PANIC:
            raise  # Ctrl-C, and what ends the process
        raise error(f"{_shown(where)} {fault} ({short(failure)}); {advice}") from failure


def check_plain(path: Path, what: str) -> None:
    """Refuse what is not a regular file: a pipe would wait for ever, a device never end.

    Raises:
        DataError: ``path`` is absent, or neither a regular file nor a link to one.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError as failure:
        raise DataError(f"there is no file {_shown(path)}") from failure
    except (OSError, ValueError) as failure:  # ValueError: a name with a null character
        reason = getattr(failure, "strerror", None) or failure
        raise DataError(f"cannot read {_shown(path)}: {reason}") from failure
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise DataError(f"{_shown(path)} is {kind}; a file of this kind is {what}")


def short(error: BaseException, longest: int = _LONGEST) -> str:
    """Return the reason of an error as one short printable line: parsers quote their input."""
    name = type(error).__name__
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    try:
        text = " ".join(str(error).split())
    except Exception:  # a text that cannot be made is no reason to fail
        return name
    if isinstance(error, KeyError):
        text = f"it lacks {text}"
    elif isinstance(error, (LookupError, AssertionError)) or not text:
        text = f"{name}: {text}" if text else name
    text = printable(text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _shown(where: str | os.PathLike[str]) -> str:
    return printable(os.fspath(where))
