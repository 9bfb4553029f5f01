"""Output for people: tables and progress on a terminal, plain lines elsewhere, one JSON object with ``--json``.

Text from outside (file names, messages of libraries) is escaped here, in one place, by `vtk.text`.
"""

import contextlib
import io
import logging
import math
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from vtk import stdio
from vtk.formats import to_json
from vtk.text import printable, printable_json, several_lines

_json_mode = False
_in_command = False
_stages: ContextVar[bool] = ContextVar("stages", default=False)
_WIDEST = 1 << 16  # columns of a table that is not folded
_WORDS = re.compile(r"\S+\s*|\s+")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise as the rest of Python does when the reader went away; rich would exit with code 1."""
        raise BrokenPipeError


def set_json(on: bool) -> None:
    """Reserve stdout for the one JSON object; everything else goes to stderr."""
    global _json_mode
    _json_mode = on


def set_command(on: bool) -> None:
    """Let `note` print: a command is running, rather than a function called from Python."""
    global _in_command
    _in_command = on


def stream(width: int | None = None) -> Console:
    """Return a new console for people: stdout, or stderr under ``--json``; new, so that redirection is honoured."""
    file = sys.stderr if _json_mode else sys.stdout
    return _Console(file=file, highlight=False, soft_wrap=not _is_terminal(), width=width)


def say(text: str = "", *more: str, style: str | None = None) -> None:
    """Print lines for people; markup in them is not interpreted."""
    for line in (text, *more):
        _print(stream(), line, style)


def warn(text: str) -> None:
    """Print one warning line on stderr."""
    _print(_Console(file=sys.stderr, highlight=False), f"warning: {text}", "yellow")


def complain(text: str) -> None:
    """Print one line on stderr, without colours."""
    stdio.say_error(printable(text))


def show_traceback() -> None:
    """Print the traceback of the current exception on stderr."""
    stdio.say_error(several_lines(traceback.format_exc().rstrip()))


def guard_messages() -> None:
    """Escape the warnings and log records of other libraries, too: they quote file names and contents."""
    as_text, record = warnings.formatwarning, logging.getLogRecordFactory()

    def escaped_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        entry = record(*args, **kwargs)
        with contextlib.suppress(Exception):  # its arguments do not fit, which logging itself reports
            entry.msg, entry.args = several_lines(entry.getMessage()), ()
        return entry

    warnings.formatwarning = lambda *args, **kwargs: several_lines(as_text(*args, **kwargs))
    logging.setLogRecordFactory(escaped_record)


@contextlib.contextmanager
def stages(on: bool) -> Iterator[None]:
    """Turn `stage` on or off inside the context; work that is called from Python is silent by default."""
    token = _stages.set(on)
    try:
        yield
    finally:
        _stages.reset(token)


def stage(text: str) -> None:
    """Announce the next step of long work, inside `stages`; silent with ``--json``."""
    if _stages.get() and not _json_mode:
        say(f"{text} …", style="dim")


def note(text: str) -> None:
    """Print a remark of a command; silent in functions called from Python, and with ``--json``."""
    if _in_command and not _json_mode:
        say(text, style="dim")


def emit_json(value: dict[str, Any]) -> None:
    """Print the command's result on stdout, only under ``--json``; NaN and infinity become null."""
    if _json_mode:
        sys.stdout.write(printable_json(to_json(_finite(value))) + "\n")
        sys.stdout.flush()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, left: Sequence[int] = (0,)) -> None:
    """Print a table; columns whose index is in ``left`` are text, the others are numbers and align right.

    A table wider than the terminal has its first column, if that is text such as a path, on lines of their own, so that
    it can be copied as a whole, and the other columns below.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    grid, out = _grid(columns, cells, left), stream()
    say(title, style="bold")
    needed = _width(grid, out)
    if needed > out.width and not _is_terminal():
        out = stream(needed)  # a file has no width
    if needed <= out.width or 0 not in left or len(columns) < 2:
        out.print(grid)
        return
    others = _grid(columns[1:], [row[1:] for row in cells], [i - 1 for i in left])
    room = _width(others, out)
    if room + 2 <= out.width:
        Console(file=(plain := io.StringIO()), width=room).print(others)
        head, *lines = plain.getvalue().splitlines()
        say(columns[0], f"  {head}", style="dim")
    else:
        lines = ["  ".join(f"{n} {v}" for n, v in zip(columns[1:], row[1:], strict=True) if v.plain) for row in cells]
    for (first, *_), line in zip(cells, lines, strict=True):
        out.print(first, soft_wrap=True)
        out.print(Padding(Text(printable(line)), (0, 0, 0, 2)))


def _grid(columns: Sequence[str], cells: Sequence[Sequence[Text]], left: Sequence[int]) -> Table:
    grid = Table(box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(columns):
        grid.add_column(Text(printable(name)), justify="left" if i in left else "right", overflow="fold")
    for row in cells:
        grid.add_row(*row)
    return grid


def _width(grid: Table, out: Console) -> int:
    return max(out.measure(grid, options=out.options.update(width=_WIDEST)).maximum, 1)


def percent(fraction: float, digits: int = 1) -> str:
    """Format a fraction as a percentage, ``–`` for NaN (no images)."""
    return "–" if math.isnan(fraction) else f"{100 * fraction:.{digits}f} %"


def size(n_bytes: float) -> str:
    """Format a number of bytes in decimal units (1 MB = 10⁶ bytes)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n_bytes) < 1000 or unit == "GB":
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    raise AssertionError("unreachable")


def deviation(of: str, worst: float) -> str:
    """Say how far numbers are from those ``of`` others, given the largest difference."""
    return f"differ from {of} by at most {worst:.0e}" if worst else f"equal {of} bit for bit"


def count(n: int, noun: str) -> str:
    """Return a number with its noun: ``1 image``, ``2 images``."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


class Tracker(Protocol):
    """The interface of what `progress` yields."""

    def advance(self, n: int = 1, note: str = "") -> None:
        """Count ``n`` more units; ``note`` replaces the text after the bar."""


@contextlib.contextmanager
def progress(title: str, total: int, *, unit: str = "images", enabled: bool = True, done: int = 0) -> Iterator[Tracker]:
    """Show a bar with rate and time left on a terminal, at most one plain line per ten seconds elsewhere.

    ``done`` units of the total count as done at the start.
    """
    if not enabled:
        yield _Silent()
    elif _is_terminal():
        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=None), MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}", markup=False), TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
        )  # fmt: skip
        with Progress(*columns, console=stream(), transient=True) as bar:
            yield _Bar(bar, title, total, unit, done)
    else:
        yield _Lines(title, total, unit, done)


class _Silent:
    def advance(self, n: int = 1, note: str = "") -> None: ...


class _Bar:
    def __init__(self, bar: Progress, title: str, total: int, unit: str, before: int = 0) -> None:
        self.bar, self.unit, self.done, self.start = bar, unit, 0, time.perf_counter()
        self.task = bar.add_task(printable(title), total=total, completed=before, rate="", note="")

    def advance(self, n: int = 1, note: str = "") -> None:
        self.done += n
        rate = self.done / max(time.perf_counter() - self.start, 1e-9)
        fields: dict[str, Any] = {"note": printable(note)} if note else {}
        self.bar.update(self.task, advance=n, rate=_speed(rate, self.unit), **fields)


class _Lines:
    """Progress for logs: silent for the first ten seconds, so that short loops print nothing."""

    def __init__(self, title: str, total: int, unit: str, before: int = 0) -> None:
        self.title, self.total, self.unit, self.before = title, total, unit, before
        self.done, self.start = before, time.perf_counter()
        self.next = self.start + 10

    def advance(self, n: int = 1, note: str = "") -> None:
        self.done += n
        now = time.perf_counter()
        if now >= self.next:
            self.next = now + 10
            rate = (self.done - self.before) / (now - self.start)
            left = (self.total - self.done) / max(rate, 1e-9)
            say(
                f"{self.title}: {self.done}/{self.total} {self.unit}, {_speed(rate, self.unit)}, {left:.0f} s left"
                f"{', ' if note else ''}{note}"
            )


def _speed(rate: float, unit: str) -> str:
    return f"{rate:,.0f} {unit}/s" if rate >= 1 or not rate else f"{1 / rate:,.0f} s each"


def _is_terminal() -> bool:
    return (sys.stderr if _json_mode else sys.stdout).isatty()


def _print(out: Console, text: str, style: str | None) -> None:
    """Print one line; on a terminal it wraps between words, and a long word, such as a path, stays in one piece."""
    shown = printable(text)
    for line in _lines(shown, out.width) if out.file.isatty() else (shown,):
        out.print(Text(line), style=style, soft_wrap=True)


def _lines(text: str, width: int) -> Iterator[str]:
    line = ""
    for word in _WORDS.findall(text):
        if line.strip() and cell_len(line + word.rstrip()) > width:
            yield line.rstrip()
            line = ""
        line += word
    yield line


def _cell(value: object) -> Text:
    if value is None:
        return Text("–")
    if isinstance(value, float):
        return Text("–" if math.isnan(value) else f"{value:.3f}")
    return Text(printable(str(value)))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
