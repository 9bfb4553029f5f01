"""The value range of a data set: what its images of more than 8 bits hold, and which LOW and HIGH become 0 and 255.

Every such file is measured once, when the scan decodes it: type, and quantiles of each band from the smallest to the
largest value. From all files together the range is settled, one for a model of 1 or 3 channels and one for each band
otherwise. By default it goes from the smallest to the largest value, but

- a few files (1 of 10 to 99, 2 % of more) whose values go beyond twice the range of all others do not count; the audit
  names them, and their values are cut off;
- an end within 5 % of a usual one is moved there: 0 below; above 1 of floats, and all bits set of 8, 10, 12, 14, 16 or
  32 bits.

``--value-range LOW HIGH`` sets both ends; ``p1`` is the first percentile of all pixels, interpolated between the files'
quantiles. Images of 8 bits are taken as they are.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vtk.card import VALUE_TYPES
from vtk.data import icc_profiles as profiles
from vtk.data.decoding_rules import SRGB, Decoding
from vtk.errors import DataError, UsageError
from vtk.text import one_line

if TYPE_CHECKING:
    from vtk.data.pixels import Pixels
    from vtk.data.probe_file import Probe

LEVELS = (0, 0.1, 0.5, 1, 2, 5, 10, 25, 50, 75, 90, 95, 98, 99, 99.5, 99.9, 100)
"""Percentiles that are noted of each band."""

_NEAR = 0.05
_FEW = 40
"""Of 256 levels: when the middle 98 % of all pixels have fewer, the audit says so."""

_SAMPLED = 1 << 20
_SHOWN = 3
_NAMED = 6
_BANDS_SHOWN = 16
_USUAL = (255.0, 1023.0, 4095.0, 16383.0, 65535.0, 2.0**32 - 1)

Option = tuple[str, ...]
"""What ``--value-range`` was given: nothing, or two texts."""


class Values(NamedTuple):
    """What one file holds.

    Attributes:
        type: NumPy's name.
        bands: for each band the percentiles `LEVELS`, None of one without a value or of 8 bits.
        strange: values that are no numbers (NaN, infinite), or stand for no data.
    """

    type: str
    bands: tuple[tuple[float, ...] | None, ...]
    strange: int = 0

    def text(self) -> str:
        """Return it for `vtk.data.probe_file.Probe`."""
        return json.dumps([self.type, self.bands, self.strange], separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "Values":
        """Read `text`."""
        kind, bands, strange = json.loads(text)
        return cls(kind, tuple(None if band is None else tuple(band) for band in bands), strange)


def measure(pixels: "Pixels") -> Values | None:
    """Return what a file holds; None where all its bands have 8 bits."""
    from vtk.data.pixels import valid

    measured = pixels.measured
    if not measured:
        return None
    strange = 0
    bands: list[tuple[float, ...] | None] = []
    for i, plane in enumerate(pixels.planes):
        if i not in measured:
            bands.append(None)
            continue
        values = valid(plane, pixels.no_data)
        strange += plane.size - values.size
        bands.append(_quantiles(values) if values.size else None)
    kind = np.result_type(*(pixels.planes[i].dtype for i in measured)).name
    return Values(kind, tuple(bands), strange)


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


def parse_option(option: Sequence[str]) -> Option:
    """Check ``--value-range``.

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


class Found(NamedTuple):
    """A value range, and what is to be said about it.

    Attributes:
        decoding: with the range.
        notes: one sentence each.
        warnings: one sentence each.
        facts: for JSON; empty where all images have 8 bits.
        colors: kind of embedded profile → number of images.
    """

    decoding: Decoding
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    facts: Mapping[str, Any] = MappingProxyType({})
    colors: Mapping[str, int] = MappingProxyType({})


def settle(
    files: Mapping[str, tuple[str, int]], decoding: Decoding, option: Sequence[str], in_chans: int, *, known: bool
) -> Found:
    """Settle the range of a data set, or hold it against a model's.

    Args:
        files: for each good file its `Values.text`, empty of 8 bits, and the number of its pixels.
        decoding: rules; of a model that is trained already with its range.
        option: ``--value-range``.
        in_chans: of the model.
        known: it is such a model: nothing is settled.

    Raises:
        UsageError: ``option`` is wrong.
        DataError: by it LOW is not below HIGH.
    """
    option = parse_option(option)
    if decoding.rules == "v0.1":
        return Found(decoding)
    wide = {name: Values.parse(text) for name, (text, _) in files.items() if text}
    if not wide:
        said = "`--value-range` has no effect: no image has more than 8 bits"
        return Found(decoding, warnings=(said,) if option else ())
    bands = 1 if in_chans in (1, 3) else max(len(values.bands) for values in wide.values())
    weights = np.array([files[name][1] for name in wide], np.float64)
    tables = [_table(list(wide.values()), weights, band if bands > 1 else None) for band in range(bands)]
    everything = _table(list(wide.values()), weights, None)
    kind = np.result_type(*(values.type for values in wide.values())).name
    kind = kind if kind in VALUE_TYPES else "float64"  # of 32-bit integers with and without a sign
    if not known:
        chosen = [_range(t if len(t.rows) else everything, option, kind) for t in tables]
        if len(chosen) not in (1, in_chans):
            chosen = [_range(everything, option, kind)]
        decoding = Decoding(decoding.rules, tuple(chosen), kind)
    return _told(wide, weights, decoding, len(files), option, kind, everything, tables, known=known)


def judge(probes: Mapping[str, "Probe"], decoding: Decoding | None, option: Sequence[str], in_chans: int) -> Found:
    """Settle the range of what a scan found, and say what is done with more than 8 bits and with colour profiles.

    Args:
        probes: of all files.
        decoding: of a model that is trained already; None of a data set to train on.
        option: ``--value-range``.
        in_chans: of the model.

    Raises:
        UsageError: ``option`` is wrong.
        DataError: by it LOW is not below HIGH.
    """
    good = {name: probe for name, probe in probes.items() if not probe.bad}
    values = {name: (probe.values, probe.width * probe.height) for name, probe in good.items()}
    found = settle(values, decoding or SRGB, option, in_chans, known=decoding is not None)
    colors = dict(Counter(probe.colors for probe in good.values() if probe.colors).most_common())
    if not colors:
        return found
    converted = {
        name: n for name, n in colors.items() if name != profiles.SRGB and not name.startswith(profiles.IGNORED)
    }
    passed = {name: n for name, n in colors.items() if name.startswith(profiles.IGNORED)}
    notes, warnings = list(found.notes), list(found.warnings)
    if converted:
        notes.append(f"colour profiles converted to sRGB: {_counted(converted)}")
    if passed:
        warnings.append(f"colours {_counted(passed)}")
    return found._replace(notes=tuple(notes), warnings=tuple(warnings), colors=colors)


def _counted(names: Mapping[str, int]) -> str:
    shown = list(names.items())[:_NAMED]
    more = f" and {len(names) - _NAMED} others" * (len(names) > _NAMED)
    return ", ".join(f"{name} in {n} image{'s' * (n > 1)}" for name, n in shown) + more


class _Table(NamedTuple):
    """Quantiles of bands, (rows, levels), the number of each row's file, and how many pixels it stands for."""

    rows: np.ndarray
    of: np.ndarray
    weights: np.ndarray

    def extremes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the smallest and the largest value of each file, sorted."""
        lows, highs = np.full(self.of.max() + 1, np.inf), np.full(self.of.max() + 1, -np.inf)
        np.minimum.at(lows, self.of, self.rows[:, 0])
        np.maximum.at(highs, self.of, self.rows[:, -1])
        return np.sort(lows[np.isfinite(lows)]), np.sort(highs[np.isfinite(highs)])

    def end(self, level: int) -> float | None:
        """Return the smallest (0) or largest (-1) value; None where there is none."""
        if not len(self.rows):
            return None
        return float(self.rows[:, 0].min() if level == 0 else self.rows[:, -1].max())


def _table(values: Sequence[Values], weights: np.ndarray, band: int | None) -> _Table:
    """Gather the quantiles of a band of all files, or of all bands together."""
    rows = [
        (own, number)
        for number, each in enumerate(values)
        for i, own in enumerate(each.bands)
        if own is not None and band in (None, i)
    ]
    of = np.array([number for _, number in rows], np.int64)
    return _Table(np.array([own for own, _ in rows], np.float64).reshape(-1, len(LEVELS)), of, weights[of])


def _mixed(found: _Table, percent: float) -> float:
    """Return a percentile of all files and bands together, each spread evenly between its own quantiles."""
    table, weights = found.rows, found.weights
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


def _range(table: _Table, option: Option, kind: str) -> tuple[float, float]:
    if not len(table.rows):  # nothing but NaN
        return 0.0, 1.0
    if option:
        low, high = (_mixed(table, float(end[1:])) if end[0] == "p" else float(end) for end in option)
        if np.dtype(kind).kind != "f":
            ends = zip(option, (low, high), strict=True)
            low, high = (float(round(value)) if end[0] == "p" else value for end, value in ends)
        if not high - low > 1e-300 or not np.isfinite(high - low):
            raise DataError(
                f"`--value-range` {' '.join(option)} goes from {_plain(low)} to {_plain(high)} here; give two numbers, "
                "LOW below HIGH"
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
    """Move ends to usual ones that are near."""
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


def _told(
    wide: Mapping[str, Values], weights: np.ndarray, decoding: Decoding, files: int, option: Option, kind: str,
    everything: _Table, tables: Sequence[_Table], *, known: bool,
) -> Found:  # fmt: skip
    notes: list[str] = []
    warnings: list[str] = []
    types = sorted({values.type for values in wide.values()})
    whole = f"{len(wide)} image{'s' * (len(wide) > 1)} of {', '.join(types)}"
    least, most = everything.end(0), everything.end(-1)
    facts: dict[str, Any] = {"type": kind, "files": len(wide), "min": least, "max": most}
    facts["bands"] = [{"min": t.end(0), "max": t.end(-1)} for t in tables]
    facts["range"] = [list(pair) for pair in decoding.ranges]
    text = f"more than 8 bits: {whole}"
    if least is not None and most is not None:
        text += f", values from {_plain(least)} to {_plain(most)}"
    if not decoding.ranges:
        warnings.append(
            f"{text}; the model was trained on images of 8 bits and has no value range: each is scaled by its own "
            "type or values"
        )
        return Found(decoding, tuple(notes), tuple(warnings), facts)
    if len(decoding.ranges) == 1:
        shown = f"{show_range(decoding.ranges[0])} becomes 0…255"
    else:
        parts = [f"{i}: {show_range(pair)}" for i, pair in enumerate(decoding.ranges[:_BANDS_SHOWN], 1)]
        more = f" and {len(decoding.ranges) - _BANDS_SHOWN} more" * (len(decoding.ranges) > _BANDS_SHOWN)
        shown = f"by band {', '.join(parts)}{more} become 0…255"
    how = (
        "the model's range"
        if known
        else f"--value-range {' '.join(option)}"
        if option
        else "--value-range sets another"
    )
    notes.append(f"{text}; {shown} ({how})")
    if files > len(wide):
        notes.append(f"{files - len(wide)} images have 8 bits and are taken as they are, not by the value range")
    cut = {name: values for name, values in wide.items() if is_outside(values, decoding)}
    facts["outside"] = list(cut)
    if cut:
        names = ", ".join(f"{one_line(name)} ({_extremes(v)})" for name, v in list(cut.items())[:_SHOWN])
        more = f" and {len(cut) - _SHOWN} more" * (len(cut) > _SHOWN)
        one = len(cut) == 1
        warnings.append(
            f"{len(cut)} image{'' if one else 's'} {'has' if one else 'have'} values outside of the value range, which "
            f"are cut off: {names}{more}"
        )
    if strange := [name for name, values in wide.items() if values.strange]:
        notes.append(
            f"{len(strange)} images have values that are NaN, infinite or no data, for example {one_line(strange[0])}: "
            "they become 0, infinity 255"
        )
    if not known and len(decoding.ranges) == 1:
        warnings += _few_levels(wide, weights, decoding.ranges[0], types)
    return Found(decoding, tuple(notes), tuple(warnings), facts)


def _few_levels(
    wide: Mapping[str, Values], weights: np.ndarray, chosen: tuple[float, float], types: Sequence[str]
) -> list[str]:
    """Return a warning for each type of which nearly all pixels share few of the 256 levels."""
    found = []
    for kind in types:
        own = [values.type == kind for values in wide.values()]
        table = _table([values for values in wide.values() if values.type == kind], weights[own], None)
        if not len(table.rows):
            continue
        least, most = table.end(0), table.end(-1)
        low, high = (_mixed(table, level) for level in (1, 99))
        levels = (high - low) / (chosen[1] - chosen[0]) * 255
        of = f"of the {sum(own)} images of {kind}"
        if least == most:
            found.append(f"all values {of} are {_plain(most or 0.0)}")
        elif levels < _FEW:
            how = "--value-range p1 p99 would spread them" if len(types) == 1 else "store all images as one type"
            found.append(
                f"98 % of the pixels {of} lie in {_plain(low)} to {_plain(high)}, {levels + 1:.0f} of the 256 levels; "
                f"{how}"
            )
    return found


def _extremes(values: Values) -> str:
    known = [band for band in values.bands if band]
    return f"{_plain(min(band[0] for band in known))} to {_plain(max(band[-1] for band in known))}"


def is_outside(values: Values, decoding: Decoding) -> bool:
    """Tell whether a file has values outside of a range."""
    from vtk.data.pixels import range_of

    for band, found in enumerate(values.bands):
        if found is not None and decoding.ranges:
            low, high = range_of(decoding.ranges, band)
            if found[0] < low or found[-1] > high:
                return True
    return False


def show_range(pair: tuple[float, float]) -> str:
    """Return a range for people."""
    return f"{_plain(pair[0])}…{_plain(pair[1])}"


def _plain(value: float) -> str:
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.6g}"
