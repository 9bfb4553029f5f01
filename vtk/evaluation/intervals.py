"""Intervals of proportions, and of the difference of two models' accuracies on the same images."""

import math
from collections.abc import Callable

NORMAL95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""

_HALVINGS = 60


def wilson(successes: int, count: int, z: float = NORMAL95) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion (Wilson, 1927), by default of 95 %."""
    share, extra = successes / count, z * z / count
    centre, half = share + extra / 2, z * math.sqrt(share * (1 - share) / count + extra / (4 * count))
    return max(0.0, (centre - half) / (1 + extra)), min(1.0, (centre + half) / (1 + extra))


def paired_difference(lost: int, gained: int, count: int, z: float = NORMAL95) -> tuple[float, float]:
    """Return the score interval of a drop of accuracy, measured on the same images (Tango, 1998), by default of 95 %.

    It is not empty where the two models answer alike on every image.

    Args:
        lost: images that only the first model has right.
        gained: images that only the second model has right.
        count: all images.
        z: normal quantile.

    Returns:
        Lower and upper limit of (lost - gained) / count in the population, from -1 to 1.
    """
    centre = (lost - gained) / count

    def statistic(drop: float) -> float:
        return _score(lost, gained, count, drop)

    low = _root(lambda drop: statistic(drop) - z, -1.0, centre)
    high = _root(lambda drop: statistic(drop) + z, centre, 1.0)
    return low, high


def _score(lost: int, gained: int, count: int, drop: float) -> float:
    """Return Tango's statistic of the hypothesis that the drop is ``drop``; it falls with ``drop``."""
    square = 2 * count
    linear = -lost - gained + (2 * count - lost + gained) * drop
    constant = -gained * drop * (1 - drop)
    # the constrained estimate of the share that only the second model has right
    share = (math.sqrt(max(linear * linear - 4 * square * constant, 0.0)) - linear) / (2 * square)
    variance = count * (2 * share + drop * (1 - drop))
    off = lost - gained - count * drop
    if variance <= 0:
        return 0.0 if off == 0 else math.copysign(math.inf, off)
    return off / math.sqrt(variance)


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Return where a falling function crosses zero, by bisection; an end if it does not."""
    if falling(low) <= 0:
        return low
    if falling(high) >= 0:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2
