"""What people see: tables and progress on a terminal, plain lines elsewhere, one JSON object with ``--json``."""

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vtk.formats import to_json

_json_mode = False
_stages: ContextVar[bool] = ContextVar("stages", default=False)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Say that the reader went away as the rest of Python does; rich would exit with code 1."""
        raise BrokenPipeError


def set_json(on: bool) -> None:
    """With ``on``, stdout is kept for the one JSON object and everything else goes to stderr."""
    global _json_mode
    _json_mode = on


def stream() -> Console:
    """Return the console for people: stdout, or stderr under ``--json``. Made anew so that redirection is honoured."""
    return _Console(file=sys.stderr if _json_mode else sys.stdout, highlight=False, soft_wrap=not _is_terminal())


def say(text: str = "", style: str | None = None) -> None:
    """Print one line for people; square brackets are printed as they are."""
    stream().print(text, style=style, markup=False)


def warn(text: str) -> None:
    """Print one warning line on stderr."""
    Console(file=sys.stderr, highlight=False, soft_wrap=True).print(f"warning: {text}", style="yellow", markup=False)


@contextlib.contextmanager
def stages(on: bool) -> Iterator[None]:
    """Let `stage` print inside of the context, or not: work that is called from Python is silent unless it is told."""
    token = _stages.set(on)
    try:
        yield
    finally:
        _stages.reset(token)


def stage(text: str) -> None:
    """Say what long work does next, inside of `stages`; with ``--json`` nothing."""
    if _stages.get() and not _json_mode:
        stream().print(f"{text} …", style="dim", markup=False)


def emit_json(value: dict[str, Any]) -> None:
    """Print the command's result on stdout, only under ``--json``; NaN and infinity become null."""
    if _json_mode:
        sys.stdout.write(to_json(_finite(value)) + "\n")
        sys.stdout.flush()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, left: Sequence[int] = (0,)) -> None:
    """Print a table; columns whose index is in ``left`` are text, all others are numbers and align right."""
    grid = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(columns):
        grid.add_column(name, justify="left" if i in left else "right", overflow="fold")
    for row in rows:
        grid.add_row(*(_cell(value) for value in row))
    stream().print(grid)


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


class Tracker(Protocol):
    """What `progress` yields."""

    def advance(self, n: int = 1, note: str = "") -> None:
        """Count ``n`` more units done; ``note`` replaces the text behind the bar."""


@contextlib.contextmanager
def progress(title: str, total: int, *, unit: str = "images", enabled: bool = True, done: int = 0) -> Iterator[Tracker]:
    """Show a bar with rate and time left on a terminal, at most one plain line per ten seconds elsewhere.

    ``done`` units of the total were done before.
    """
    if not enabled:
        yield _Silent()
    elif _is_terminal():
        columns = (
            TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
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
        self.task = bar.add_task(title, total=total, completed=before, rate="", note="")

    def advance(self, n: int = 1, note: str = "") -> None:
        self.done += n
        rate = self.done / max(time.perf_counter() - self.start, 1e-9)
        fields: dict[str, Any] = {"note": note} if note else {}
        self.bar.update(self.task, advance=n, rate=f"{rate:,.0f} {self.unit}/s", **fields)


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
                f"{self.title}: {self.done}/{self.total} {self.unit}, {rate:,.0f} {self.unit}/s, {left:.0f} s left "
                f"{note}".rstrip()
            )


def _is_terminal() -> bool:
    return (sys.stderr if _json_mode else sys.stdout).isatty()


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.3f}"
    return str(value).replace("[", "\\[")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
