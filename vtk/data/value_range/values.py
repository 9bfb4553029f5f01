"""Values of one image of more than 8 bits: its type, and quantiles of each band; tables of the quantiles of many."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vtk.data.decoding.rules import Decoding

if TYPE_CHECKING:
    from vtk.data.decoding.pixels import Pixels

LEVELS = (0, 0.1, 0.5, 1, 2, 5, 10, 25, 50, 75, 90, 95, 98, 99, 99.5, 99.9, 100)
"""Percentiles that are stored of each band."""

_SAMPLED = 1 << 20


class Values(NamedTuple):
    """Values of one image.

    Attributes:
        type: NumPy's name of the type.
        bands: for each band the percentiles `LEVELS`; None for a band of 8 bits or without valid values.
        invalid: number of values that are NaN, infinite, or stand for no data.
    """

    type: str
    bands: tuple[tuple[float, ...] | None, ...]
    invalid: int = 0

    def text(self) -> str:
        """Return it as JSON, for `vtk.data.probing.probe.Probe`."""
        return json.dumps([self.type, self.bands, self.invalid], separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "Values":
        """Return the values of a `text`."""
        kind, bands, invalid = json.loads(text)
        return cls(kind, tuple(None if band is None else tuple(band) for band in bands), invalid)


def measure(pixels: "Pixels") -> Values | None:
    """Return the values of an image; None if all its bands have 8 bits."""
    from vtk.data.decoding.pixels import valid

    measured = pixels.measured
    if not measured:
        return None
    invalid = 0
    bands: list[tuple[float, ...] | None] = []
    for i, plane in enumerate(pixels.planes):
        if i not in measured:
            bands.append(None)
            continue
        values = valid(plane, pixels.no_data)
        invalid += plane.size - values.size
        bands.append(_quantiles(values) if values.size else None)
    kind = np.result_type(*(pixels.planes[i].dtype for i in measured)).name
    return Values(kind, tuple(bands), invalid)


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    if values.dtype.kind in "iu" and values.dtype.itemsize <= 2:  # exact, by counting
        least = int(values.min())
        total = np.cumsum(np.bincount(values.astype(np.int64) - least))
        places = np.ceil(np.array(LEVELS) / 100 * total[-1]).clip(1)
        return tuple(float(v) for v in np.searchsorted(total, places) + least)
    step = -(-values.size // _SAMPLED)
    inner = np.quantile(values[::step].astype(np.float64), np.array(LEVELS[1:-1]) / 100)
    ends = float(values.min()), float(values.max())
    return ends[0], *(float(min(max(v, ends[0]), ends[1])) for v in inner), ends[1]


def is_outside(values: Values, decoding: Decoding) -> bool:
    """Return whether a file has values outside the range."""
    from vtk.data.decoding.pixels import range_of

    for band, found in enumerate(values.bands):
        if found is not None and decoding.ranges:
            low, high = range_of(decoding.ranges, band)
            if found[0] < low or found[-1] > high:
                return True
    return False


class Quantiles(NamedTuple):
    """Quantiles of bands (rows, levels), with the file of each row and its number of pixels."""

    rows: np.ndarray
    files: np.ndarray
    weights: np.ndarray

    def extremes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the smallest and the largest value of each file, sorted."""
        lows, highs = np.full(self.files.max() + 1, np.inf), np.full(self.files.max() + 1, -np.inf)
        np.minimum.at(lows, self.files, self.rows[:, 0])
        np.maximum.at(highs, self.files, self.rows[:, -1])
        return np.sort(lows[np.isfinite(lows)]), np.sort(highs[np.isfinite(highs)])

    def end(self, level: int) -> float | None:
        """Return the smallest (0) or largest (-1) value; None if there are no rows."""
        if not len(self.rows):
            return None
        return float(self.rows[:, 0].min() if level == 0 else self.rows[:, -1].max())

    def percentile(self, percent: float) -> float:
        """Return a percentile of all files and bands together, each spread evenly between its own quantiles."""
        table, weights = self.rows, self.weights
        low, high = float(table[:, 0].min()), float(table[:, -1].max())
        if percent <= 0 or percent >= 100 or low == high:
            return low if percent <= 0 else high
        levels = np.array(LEVELS) / 100
        rows = np.arange(len(table))
        for _ in range(60):
            middle = low + (high - low) / 2
            at = (table <= middle).sum(1)
            left = np.clip(at - 1, 0, len(LEVELS) - 2)
            step = table[rows, left + 1] - table[rows, left]
            share = np.where(step > 0, (middle - table[rows, left]) / np.where(step > 0, step, 1), 1.0)
            below = levels[left] + np.clip(share, 0, 1) * (levels[left + 1] - levels[left])
            below = np.where(at == 0, 0.0, np.where(at == len(LEVELS), 1.0, below))
            if (below * weights).sum() / weights.sum() < percent / 100:
                low = middle
            else:
                high = middle
            if not low < low + (high - low) / 2 < high:
                break
        return high


def gather_quantiles(values: Sequence[Values], weights: np.ndarray, band: int | None) -> Quantiles:
    """Return the quantiles of a band of all files, or of all bands together."""
    rows = [
        (own, number)
        for number, each in enumerate(values)
        for i, own in enumerate(each.bands)
        if own is not None and band in (None, i)
    ]
    of = np.array([number for _, number in rows], np.int64)
    return Quantiles(np.array([own for own, _ in rows], np.float64).reshape(-1, len(LEVELS)), of, weights[of])
