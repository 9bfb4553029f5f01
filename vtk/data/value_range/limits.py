"""Ends of a value range: given by ``--value-range``, or from the quantiles of all files."""

import re
from collections.abc import Sequence

import numpy as np

from vtk.data.decoding.rules import show_value
from vtk.data.value_range.values import Quantiles
from vtk.errors import DataError, UsageError

_NEAR = 0.05
_USUAL = (255.0, 1023.0, 4095.0, 16383.0, 65535.0, 2.0**32 - 1)

Option = tuple[str, ...]
"""Argument of ``--value-range``: nothing, or two texts."""


def parse_option(option: Sequence[str]) -> Option:
    """Return the checked value of ``--value-range``.

    Raises:
        UsageError: it is not two numbers or percentiles, or LOW is not below HIGH.
    """
    if not option:
        return ()
    shown = " ".join(option)
    if len(option) != 2 or not all(map(_is_end, option)):
        raise UsageError(
            f"`--value-range` is {shown!r}; give two ends LOW HIGH, each a number or a percentile such as p1 or p99"
        )
    low, high = ((end[0] == "p", float(end.lstrip("p"))) for end in option)
    if low[0] == high[0] and not low[1] < high[1]:
        raise UsageError(f"`--value-range` is {shown}; LOW must be below HIGH")
    return tuple(option)


def _is_end(text: str) -> bool:
    if text.startswith("p"):
        return bool(re.fullmatch(r"p\d+(\.\d+)?", text)) and float(text[1:]) <= 100
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False


def choose_limits(table: Quantiles, option: Option, kind: str) -> tuple[float, float]:
    """Return LOW and HIGH: of the option, or from the quantiles as `vtk.data.value_range` says.

    Args:
        table: quantiles of a band, or of all.
        option: checked by `parse_option`.
        kind: NumPy's name of the type of all images together.

    Raises:
        DataError: by the option LOW is not below HIGH.
    """
    if not len(table.rows):  # nothing but NaN
        return 0.0, 1.0
    if option:
        low, high = (table.percentile(float(end[1:])) if end[0] == "p" else float(end) for end in option)
        if np.dtype(kind).kind != "f":
            ends = zip(option, (low, high), strict=True)
            low, high = (float(round(value)) if end[0] == "p" else value for end, value in ends)
        if not high - low > 1e-300 or not np.isfinite(high - low):
            raise DataError(
                f"`--value-range` {' '.join(option)} goes from {show_value(low)} to {show_value(high)} here; give two "
                "numbers, LOW below HIGH"
            )
        return low, high
    lows, highs = table.extremes()
    few = 0 if len(lows) < 10 else max(1, len(lows) // 50)
    low, high = float(lows[few]), float(highs[-1 - few])
    if few and high > low:
        span = high - low
        low = float(lows[0]) if low - lows[0] <= span else low
        high = float(highs[-1]) if highs[-1] - high <= span else high
    else:
        low, high = float(lows[0]), float(highs[-1])
    return _rounded(low, high, kind)


def _rounded(low: float, high: float, kind: str) -> tuple[float, float]:
    """Return the ends, moved to common ones that are near."""
    usual = (1.0, *_USUAL) if np.dtype(kind).kind == "f" else _USUAL
    if not high - low > 1e-300 or not np.isfinite(high - low):  # constant images, or the whole range of doubles
        if high > low:
            return max(low, -1e300), min(high, 1e300)
        return min(low, 0.0), next((end for end in usual if end >= high), high + 1.0 if high < 1e15 else 2 * high)
    near = _NEAR * (high - low)
    if 0 <= low <= near:
        low = 0.0
    high = next((end for end in usual if 0 <= end - high <= near), high)
    return low, high
