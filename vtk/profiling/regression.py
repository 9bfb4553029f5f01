"""Two profiles of the same thing: what became slower, what became faster."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vtk import console
from vtk.profiling.result import Cell, ProfileResult

SMALL = 0.03
"""A change below this fraction is not called one: medians of one machine differ by as much between two runs."""

_CONDITIONS = ("device_name", "precision", "threads", "input_shape", "model", "h2d")


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
        """Fraction by which the latency grew, None where one of the two has none."""
        return None if not self.old_ms or self.new_ms is None else self.new_ms / self.old_ms - 1

    @property
    def verdict(self) -> str:
        """One or two words."""
        if self.growth is None:
            return "same" if self.old_status == self.new_status else f"{self.old_status} → {self.new_status}"
        return "slower" if self.growth > SMALL else "faster" if self.growth < -SMALL else "same"


@dataclass(frozen=True)
class Comparison:
    """Of an old and a new profile.

    Attributes:
        changes: of cells that are in both.
        differences: conditions that differ, in words; then times cannot be compared.
        missing: cells of the old profile that the new one lacks.
    """

    changes: tuple[Change, ...]
    differences: tuple[str, ...]
    missing: tuple[str, ...]

    def regressions(self, percent: float) -> list[Change]:
        """Return the cells that are slower by more than ``percent``, or had a number and have none."""
        return [
            c for c in self.changes
            if (c.growth is not None and 100 * c.growth > percent) or (c.old_status == "ok" != c.new_status)
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        rows = [{**asdict(c), "growth": c.growth, "verdict": c.verdict} for c in self.changes]
        return {"changes": rows, "differences": list(self.differences), "missing": list(self.missing)}


def compare_profiles(old: ProfileResult | str | Path, new: ProfileResult | str | Path) -> Comparison:
    """Pair the cells of two profiles by back-end and batch size.

    Args:
        old: a result, or the path of a ``profile.json``.
        new: the same.

    Raises:
        DataError: a file is no profile.
    """
    before, after = (one if isinstance(one, ProfileResult) else ProfileResult.read(Path(one)) for one in (old, new))
    cells = _cells(after)
    changes, missing = [], []
    for (name, batch), a in _cells(before).items():
        if (b := cells.get((name, batch))) is None:
            missing.append(f"{name} batch {batch}")
            continue
        median = a.p50_ms is not None and b.p50_ms is not None
        times = (a.p50_ms, b.p50_ms) if median else (a.mean_ms, b.mean_ms)
        changes.append(Change(name, batch, *times, a.status, b.status))
    pairs = [(name, getattr(before, name), getattr(after, name)) for name in _CONDITIONS]
    differences = tuple(f"{name.replace('_', ' ')}: {a} and {b}" for name, a, b in pairs if a != b)
    return Comparison(tuple(changes), differences, tuple(missing))


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
    if found.missing:
        console.warn(f"not in the new profile: {', '.join(found.missing)}")


def _cells(result: ProfileResult) -> dict[tuple[str, int], Cell]:
    return {(backend.name, cell.batch): cell for backend, cell in result.cells()}


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
