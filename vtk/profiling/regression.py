"""Compares two profiles of the same model: regressions and improvements."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from vtk import console
from vtk.errors import DataError
from vtk.profiling.cells import Cell
from vtk.profiling.result import ProfileResult

SMALL = 0.03
"""A change below this fraction is not called one: medians of one machine differ by as much between two runs."""

_CONDITIONS = ("device_name", "precision", "threads", "input_shape", "model", "kind", "h2d")


@dataclass(frozen=True)
class Change:
    """One back-end at one batch size in both profiles.

    Attributes:
        old_ms: median, or mean where either had too few runs for a median.
        new_ms: the same.
        old_status: of the cell.
        new_status: of the cell.
    """

    backend: str
    batch: int
    old_ms: float | None
    new_ms: float | None
    old_status: str
    new_status: str

    @property
    def growth(self) -> float | None:
        """Fraction by which the latency grew, None where one of the two has none or was not measured to the end."""
        if (self.old_status, self.new_status) != ("ok", "ok"):
            return None
        old, new = self.old_ms, self.new_ms
        return new / old - 1 if _is_time(old) and _is_time(new) else None

    @property
    def comparable(self) -> bool:
        """Whether nothing was lost: a number in both, or none in the old one that said why."""
        return self.growth is not None or self.old_status != "ok"

    @property
    def verdict(self) -> str:
        """A few words."""
        if self.growth is None:
            if self.old_status != self.new_status:
                return f"{self.old_status} → {self.new_status}"
            return "no number" if self.old_status == "ok" else "same"
        return "slower" if self.growth > SMALL else "faster" if self.growth < -SMALL else "same"


@dataclass(frozen=True)
class Comparison:
    """Of an old and a new profile.

    Attributes:
        changes: of cells that are in both.
        differences: conditions that differ, in words; then times cannot be compared.
        missing: cells that the old profile has a number for and the new one lacks.
        added: cells that only the new profile has.
        gone: cells without a number in the old profile that the new one lacks, which is no loss.
        faulty: of the added ones those that are wrong, or claim a time and have none.
    """

    changes: tuple[Change, ...]
    differences: tuple[str, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    faulty: tuple[str, ...] = ()

    def regressions(self, percent: float) -> list[Change]:
        """Return the cells that are slower by more than ``percent``, or had to have a number and have none."""
        return [
            c for c in self.changes
            if not c.comparable or (c.growth is not None and 100 * c.growth > percent)
        ]  # fmt: skip

    def failures(self, percent: float) -> list[str]:
        """Return one line for each reason why the new profile does not pass; empty where it does.

        A cell that is gone or has no finite time is a reason, and so is having nothing to compare.
        """
        found = []
        for change in self.regressions(percent):
            text = change.verdict if change.growth is None else f"{100 * change.growth:+.1f} %"
            found.append(f"{change.backend} batch {change.batch}: {text}, allowed {percent:g} %")
        found += [f"{cell}: not in the new profile" for cell in self.missing]
        found += [f"{cell}, which the old profile lacks: wrong, or no number" for cell in self.faulty]
        if not found and not any(change.growth is not None for change in self.changes):
            found.append("no cell has a time in both profiles: nothing was compared")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        rows = [
            {**asdict(c), "old_ms": _plain(c.old_ms), "new_ms": _plain(c.new_ms), "growth": c.growth,
             "verdict": c.verdict}
            for c in self.changes
        ]  # fmt: skip
        lists = {"differences": self.differences, "missing": self.missing, "added": self.added, "gone": self.gone,
                 "faulty": self.faulty}  # fmt: skip
        return {"changes": rows, **{name: list(value) for name, value in lists.items()}}


def compare_profiles(old: ProfileResult | str | Path, new: ProfileResult | str | Path) -> Comparison:
    """Pair the cells of two profiles by back-end and batch size.

    Args:
        old: a result, or the path of a ``profile.json``.
        new: the same.

    Raises:
        DataError: a file is no profile, or has a cell twice.
    """
    before, after = (one if isinstance(one, ProfileResult) else ProfileResult.read(Path(one)) for one in (old, new))
    cells, known = _cells(after), _cells(before)
    changes: list[Change] = []
    missing: list[str] = []
    gone: list[str] = []
    for (name, batch), a in known.items():
        if (b := cells.get((name, batch))) is None:
            (missing if a.status == "ok" else gone).append(f"{name} batch {batch}")
            continue
        median = a.p50_ms is not None and b.p50_ms is not None
        times = (a.p50_ms, b.p50_ms) if median else (a.mean_ms, b.mean_ms)
        changes.append(Change(name, batch, *times, a.status, b.status))
    fresh = {f"{name} batch {batch}": cell for (name, batch), cell in cells.items() if (name, batch) not in known}
    faulty = tuple(
        name for name, cell in fresh.items()
        if cell.status == "mismatch" or (cell.status == "ok" and not _is_time(cell.typical_ms))
    )  # fmt: skip
    return Comparison(tuple(changes), _differences(before, after), tuple(missing), tuple(fresh), tuple(gone), faulty)


def _differences(old: ProfileResult, new: ProfileResult) -> tuple[str, ...]:
    """Return what differs between two measurements besides the times, in words."""
    pairs = [(name.replace("_", " "), getattr(old, name), getattr(new, name)) for name in _CONDITIONS]
    pairs += [(name, old.versions.get(name, "none"), new.versions.get(name, "none"))
              for name in sorted({*old.versions, *new.versions})]  # fmt: skip
    products = [{b.name: b.arithmetic or one.precision for b in one.backends} for one in (old, new)]
    pairs += [(f"products of {name}", a, products[1].get(name, a)) for name, a in products[0].items()]
    return tuple(f"{name}: {a} and {b}" for name, a, b in pairs if a != b)


def print_comparison(found: Comparison, names: Sequence[str]) -> None:
    """Print a table of every cell, and what makes it doubtful."""
    rows = [
        (c.backend, c.batch, _ms(c.old_ms), _ms(c.new_ms), "–" if c.growth is None else f"{100 * c.growth:+.1f} %",
         c.verdict)
        for c in found.changes
    ]  # fmt: skip
    columns = ("backend", "batch", "old ms", "new ms", "change", "")
    console.table(f"{names[0]} and {names[1]}", columns, rows, left=(0, 5))
    for text in found.differences:
        console.warn(f"measured under other conditions: {text}")
    for text, cells in (("the new", found.missing + found.gone), ("the old", found.added)):
        if cells:
            console.warn(f"not in {text} profile: {', '.join(cells)}")


def _cells(result: ProfileResult) -> dict[tuple[str, int], Cell]:
    found: dict[tuple[str, int], Cell] = {}
    for backend, cell in result.cells():
        if found.setdefault((backend.name, cell.batch), cell) is not cell:
            raise DataError(f"a profile of {result.source} has {backend.name} batch {cell.batch} twice; was it edited?")
    return found


def _ms(value: float | None) -> str:
    return f"{value:.3f}" if _is_time(value) else "–" if value is None else str(value)


def _is_time(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value) and value > 0


def _plain(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
