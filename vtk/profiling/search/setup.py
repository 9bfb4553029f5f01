"""A way of serving a model (a setup), what was measured of it, and the setups that a machine has room for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from vtk.profiling.stats import PERCENTILES, runs_needed

FULL = 20
"""Windows of a complete measurement; one window takes a twentieth of ``--duration``."""


@dataclass(frozen=True, order=True)
class Setup:
    """A way of serving a model.

    Attributes:
        backend: as on the command line.
        precision: ``fp32``, ``bf16``, or ``int8``, ``int8-dynamic``: of the file that it runs.
        threads: of one instance.
        instances: copies of the model that run at the same time, each in a process of its own.
        batch: images per call.
    """

    backend: str
    precision: str
    threads: int
    instances: int
    batch: int

    @property
    def variant(self) -> tuple[str, str]:
        """Back-end and precision: what decides the outputs."""
        return self.backend, self.precision

    def images_per_second(self, call_ms: float) -> float:
        """Return the images of all instances a second, each of which makes one call of ``call_ms`` after the other."""
        return 1000 * self.batch * self.instances / call_ms

    @property
    def text(self) -> str:
        """The setup in words."""
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        each = f"{self.instances} instances of {threads}" if self.instances > 1 else f"1 instance, {threads}"
        return f"{self.backend} {self.precision}, batch {self.batch}, {each}"

    @property
    def short(self) -> str:
        """Batch, threads and instances, for labels in a plot."""
        return f"{self.batch}·{self.threads}·{self.instances}"


@dataclass
class Reading:
    """Calls of one setup while all its instances were busy.

    Attributes:
        windows: of each window, the milliseconds of its calls, those of all instances together.
        seconds: that were spent on it, warm-ups included.
    """

    windows: list[tuple[float, ...]] = field(default_factory=list)
    seconds: float = 0.0
    _ordered: list[float] = field(default_factory=list, repr=False, compare=False)
    _medians: list[float] = field(default_factory=list, repr=False, compare=False)
    _means: list[float] = field(default_factory=list, repr=False, compare=False)

    def add(self, *windows: Sequence[float]) -> None:
        """Add the milliseconds of the calls of some windows."""
        for window in windows:
            self.windows.append(tuple(window))
            self._ordered = sorted((*self._ordered, *window))
            self._medians.append(quantile(sorted(window), 50))
            self._means.append(sum(window) / len(window))

    @property
    def complete(self) -> bool:
        """Whether it was measured for the whole ``--duration``."""
        return len(self.windows) >= FULL

    @property
    def runs(self) -> int:
        """Number of calls."""
        return len(self._ordered)

    @property
    def quickest_ms(self) -> float:
        """The least median of a window: a busy machine only adds to it."""
        return min(self._medians)

    @property
    def mean_ms(self) -> float:
        """Mean of all calls."""
        return sum(self._ordered) / len(self._ordered)

    @property
    def least_mean_ms(self) -> float:
        """The least mean of a window."""
        return min(self._means)

    def latency_ms(self, q: float) -> float:
        """Return the ``q``-th percentile of the calls (linear interpolation)."""
        return quantile(self._ordered, q)


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the ``q``-th percentile of ascending values, however few they are."""
    at = (len(ordered) - 1) * q / 100
    low = int(at)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (at - low)


def judged_percentile(budget_ms: float, duration_s: float) -> int:
    """Return the percentile that all setups are judged by.

    It is the highest for which a setup that just meets the budget has runs enough in ``duration_s``. So one that meets
    it has them too, and none is judged more mildly because its calls are long.
    """
    fit = [q for q in PERCENTILES if runs_needed(q) * budget_ms <= 1000 * duration_s]
    return max(fit, default=PERCENTILES[0])


def shapes(cpus: int, threads: int | None = None) -> list[tuple[int, int]]:
    """Return the (threads, instances) that use at most ``cpus``: powers of two, and the most that there is room for.

    Args:
        cpus: that the process may use.
        threads: of one instance, if they are given.
    """
    sizes = [threads] if threads is not None else _powers(cpus)
    return [(size, count) for size in sizes for count in _powers(max(cpus // size, 1))]


def _powers(most: int) -> list[int]:
    return sorted({2**i for i in range(int(math.log2(most)) + 1)} | {most})
