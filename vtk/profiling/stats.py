"""Percentiles that the number of runs supports, and a cell's summary."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

BEYOND = 10
"""A percentile is given only with this many samples beyond it: p50 needs 20 runs, p90 100, p99 1,000."""

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Latency:
    """Summary of the runs at one batch size; milliseconds, None where there were too few runs."""

    runs: int
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    mean_ms: float
    min_ms: float
    images_per_second: float


def runs_needed(q: int) -> int:
    """Return how many runs the ``q``-th percentile needs."""
    return -(-100 * BEYOND // (100 - q))


def percentile(samples: Sequence[float], q: int) -> float | None:
    """Return the ``q``-th percentile (linear interpolation, as numpy), None below ``runs_needed(q)`` samples."""
    if len(samples) < runs_needed(q):
        return None
    ordered = sorted(samples)
    position = (len(ordered) - 1) * q / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarise(seconds: Sequence[float], batch: int) -> Latency:
    """Summarise the wall times in seconds of runs of ``batch`` images each; images/s counts every run."""
    ms = [1000 * s for s in seconds]
    total = max(sum(seconds), 1e-12)
    return Latency(
        runs=len(ms),
        p50_ms=percentile(ms, 50),
        p90_ms=percentile(ms, 90),
        p99_ms=percentile(ms, 99),
        mean_ms=1000 * total / len(ms),
        min_ms=min(ms),
        images_per_second=batch * len(ms) / total,
    )


def spread(windows: Sequence[Sequence[float]], last: int = 3) -> float | None:
    """Return by which fraction the medians of the ``last`` windows differ, of the smallest; None with fewer windows."""
    if len(windows) < last:
        return None
    medians = [statistics.median(window) for window in windows[-last:]]
    return (max(medians) - min(medians)) / max(min(medians), 1e-12)
