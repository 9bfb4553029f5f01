"""Two looks at paired differences, after 5 and after 10 seeds, with the bounds of O'Brien and Fleming (1979).

At look k of K the statistic is Student's t of the differences so far, taken to the normal scale by its two-sided
p-value. O'Brien and Fleming's bounds there are C·√(K/k): hard to pass at the first look, hardly harder than a single
test's at the last. C follows from the level that both looks have together. The correlation of two means of 5 and 10
normal differences is √½; that of the tails of their t-statistics is less, because the first estimates its spread from
four degrees of freedom. With 0.5 the level that both looks have together is the nominal one (tests/benchmarks simulate
it), while √½ would make 5 % into 5.15 %.
"""

import functools
import math
import statistics
from collections.abc import Sequence

from scipy.special import ndtr, ndtri, stdtr, stdtrit

SEEDS = (5, 10)
"""Pairs at each look."""
LEVEL = 0.05
"""Two-sided level of one claim over both looks."""
POWER = 0.8
"""Chance to show a difference of the size that is called detectable."""
_CORRELATION = 0.5
_LARGEST = 8.0
"""On the normal scale, where differences are all the same number and t is infinite."""

_ROUNDING = 1e-12
"""Differences from the null below it, relative or absolute, are rounding errors: results have six digits."""


def statistic(differences: Sequence[float], null: float = 0.0) -> float:
    """Return Student's t of differences from ``null``, on the normal scale: with its sign, and the same p-value."""
    mean, error = mean_and_error(differences)
    if math.isclose(mean, null, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
        return 0.0  # without any spread too: 0.50 − 0.52 is not −0.02 in floating point
    if error == 0:
        return math.copysign(_LARGEST, mean - null)
    t = (mean - null) / error
    return math.copysign(min(_LARGEST, -float(ndtri(stdtr(len(differences) - 1, -abs(t))))), t)


def mean_and_error(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of at least two differences, and its standard error."""
    return statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


def bound(look: int, level: float = LEVEL) -> float:
    """Return what `statistic` must reach at a look (1 or 2), on either side, for a level over both."""
    return _constant(level) * math.sqrt(len(SEEDS) / look)


def level_at(look: int, level: float = LEVEL) -> float:
    """Return the two-sided level of a look alone."""
    return 2 * float(ndtr(-bound(look, level)))


def sequential_p(statistics_: Sequence[float]) -> float:
    """Return the smallest level over both looks at which one of the looks so far decides for one and the same side.

    A p-value for any number of looks, which Holm's procedure may take (Liu and Anderson 2008; Maurer and Bretz 2013).

    Args:
        statistics_: of `statistic`, of the first look or of both.
    """
    scaled = [z * math.sqrt(look / len(SEEDS)) for look, z in enumerate(statistics_, 1)]
    return _level_of(max(max(scaled), -min(scaled)))


def half_width(differences: Sequence[float], look: int, level: float = LEVEL) -> float:
    """Return by how much an interval reaches beyond the mean, such that it leaves out what the look decides against."""
    return _quantile(level_at(look, level), len(differences)) * mean_and_error(differences)[1]


def detectable(differences: Sequence[float], look: int) -> float:
    """Return the true difference that looks up to this one show with a chance of `POWER`.

    (t of the look's level, two-sided, + t of the power) · s/√n, with n − 1 degrees of freedom and the spread s that
    these differences have.
    """
    count = len(differences)
    quantiles = _quantile(level_at(look), count) + float(stdtrit(count - 1, POWER))
    return quantiles * mean_and_error(differences)[1]


def _quantile(level: float, count: int) -> float:
    return -float(stdtrit(count - 1, level / 2))


@functools.cache
def _constant(level: float) -> float:
    """Return C, by bisection: both looks together pass it with probability ``level``."""
    low, high = 0.0, _LARGEST
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _level_of(middle) > level else (low, middle)
    return (low + high) / 2


def _level_of(constant: float) -> float:
    """Return P(|Z₁| ≥ C√2 or |Z₂| ≥ C) for two standard normal numbers with the correlation above."""
    first, spread, steps = constant * math.sqrt(len(SEEDS)), math.sqrt(1 - _CORRELATION**2), 400
    # P(|Z₁| < C√2 and |Z₂| ≥ C) by Simpson's rule, so that small probabilities keep their digits
    second = 0.0
    for i in range(steps + 1):
        z = first * (2 * i / steps - 1)
        shift = _CORRELATION * z
        tails = ndtr((-constant - shift) / spread) + ndtr((-constant + shift) / spread)
        weight = 1 if i in (0, steps) else 4 if i % 2 else 2
        second += weight * math.exp(-z * z / 2) * float(tails)
    second *= 2 * first / steps / 3 / math.sqrt(2 * math.pi)
    return min(1.0, 2 * float(ndtr(-first)) + second)
