"""Results that survive a cut: rows keyed by what they measure, and a clock that ends a stage in time.

A stage asks `Store.has` before every cell and appends its row at once, so a stage that was killed continues where it
stopped. A row counts only for the same device, versions and code: after a change a cell is measured anew.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _rows
import _sources
from _rows import read

CODE = ("device", "torch", "triton", "git")
"""Columns that must agree besides a row's own key."""


class Store:
    """Rows of one CSV file, each under a key.

    Attributes:
        path: of the file, made with the first row.
        key: columns that say what a row measures.
        rows: all rows, as text, in the file's order.
        git: the commit that measures now.
    """

    def __init__(self, path: Path, key: Sequence[str], context: Callable[[], Mapping[str, str]]) -> None:
        self.path, self.key, self._context = path, tuple(key), context
        self._drop_torn_row()
        self.rows = read(path)
        here = context()
        self.git = here.get("git", "")
        self._code = self._key_of(here, CODE)

    def has(self, **cell: object) -> bool:
        """Return whether this code measured ``cell`` on this device; a row that failed does not count."""
        row = self.find(**cell)
        return row is not None and row.get("passed", "True") == "True"

    def find(self, **cell: object) -> dict[str, str] | None:
        """Return the last row of ``cell`` by this code on this device."""
        if set(cell) != set(self.key):
            raise ValueError(f"`cell` has the columns {sorted(cell)}; the key is {sorted(self.key)}")
        wanted = self._key_of({k: str(v) for k, v in cell.items()}, self.key)
        for row in reversed(self.rows):
            if self._key_of(row, self.key) == wanted and self._key_of(row, CODE) == self._code:
                return row
        return None

    def add(self, row: Mapping[str, object]) -> None:
        """Append ``row`` and the context to the file, on disk before this returns."""
        full = {k: "" if v is None else str(v) for k, v in {**row, **self._context()}.items()}
        file = self.path.name.replace("smoke_", "gpu_")
        if file in _sources.TIMED:
            subject = _sources.subject_of(file, full)
            full["code"] = "" if subject is None else _sources.current(subject)
        _rows.append(self.path, full)
        self.rows.append(full)

    def current(self) -> list[dict[str, str]]:
        """Return the last row of every cell that this code measured on this device."""
        mine = [r for r in self.rows if self._key_of(r, CODE) == self._code]
        return list({self._key_of(r, self.key): r for r in mine}.values())

    @staticmethod
    def _key_of(row: Mapping[str, str], columns: Sequence[str]) -> tuple[str | None, ...]:
        return tuple(row.get(c) for c in columns)

    def _drop_torn_row(self) -> None:
        """Remove a last line that was being written when the process was killed."""
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        if data and not data.endswith(b"\n"):
            with self.path.open("r+b") as file:
                file.truncate(data.rfind(b"\n") + 1)
                os.fsync(file.fileno())
        if self.path.stat().st_size == 0:
            self.path.unlink()


class Deadline:
    """The time a stage may still use, and the cells it had to leave out."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self.missing: list[str] = []

    @property
    def left(self) -> float:
        """Seconds that remain."""
        return self._end - self._clock()

    def allows(self, cost: float, what: str) -> bool:
        """Return whether about ``cost`` seconds remain; if not, note ``what`` as missing."""
        if self.left >= cost:
            return True
        self.missing.append(what)
        return False

    def report(self, stage: str) -> str:
        """Return one line (and the list of what is missing) for the end of a stage."""
        if not self.missing:
            return f"{stage}: complete"
        shown = "\n".join(f"  {what}" for what in self.missing[:40])
        more = f"\n  and {len(self.missing) - 40} more" if len(self.missing) > 40 else ""
        return f"{stage}: out of time, {len(self.missing)} missing; the same command continues:\n{shown}{more}"


def finish(stage: str, deadline: Deadline, failed: Sequence[Any]) -> int:
    """Print how a stage ended and return its exit code: 0 complete, 1 something failed, 3 out of time."""
    print(deadline.report(stage), flush=True)
    for what in failed:
        print(f"{stage}: FAILED {what}", flush=True)
    return 1 if failed else 3 if deadline.missing else 0
