"""Chooses the value range of a data set, or checks its images against that of a model."""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vtk.card import VALUE_TYPES
from vtk.data.decoding import icc_profiles as profiles
from vtk.data.decoding.rules import SRGB, Decoding
from vtk.data.value_range.limits import choose_limits, parse_option
from vtk.data.value_range.notes import Images, describe
from vtk.data.value_range.values import Values, gather_quantiles

if TYPE_CHECKING:
    from vtk.data.probing.probe import Probe

_NAMED = 6


class RangeChoice(NamedTuple):
    """The value range of a set, and what the user should know about it.

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


def choose_range(
    files: Mapping[str, tuple[str, int]], decoding: Decoding, option: Sequence[str], in_chans: int, *, known: bool
) -> RangeChoice:
    """Choose the range of a data set, or check the images against a model's.

    Args:
        files: for each good file its `Values.text`, empty of 8 bits, and the number of its pixels.
        decoding: rules; of a model that is trained already with its range.
        option: ``--value-range``.
        in_chans: of the model.
        known: it is such a model: nothing is chosen.

    Raises:
        UsageError: ``option`` is wrong.
        DataError: by it LOW is not below HIGH.
    """
    option = parse_option(option)
    if decoding.rules == "v0.1":
        return RangeChoice(decoding)
    wide = {name: Values.parse(text) for name, (text, _) in files.items() if text}
    if not wide:
        warning = "`--value-range` has no effect: no image has more than 8 bits"
        return RangeChoice(decoding, warnings=(warning,) if option else ())
    bands = 1 if in_chans in (1, 3) else max(len(values.bands) for values in wide.values())
    weights = np.array([files[name][1] for name in wide], np.float64)
    tables = [gather_quantiles(list(wide.values()), weights, band if bands > 1 else None) for band in range(bands)]
    everything = gather_quantiles(list(wide.values()), weights, None)
    kind = np.result_type(*(values.type for values in wide.values())).name
    kind = kind if kind in VALUE_TYPES else "float64"  # of 32-bit integers with and without a sign
    if not known:
        chosen = [choose_limits(t if len(t.rows) else everything, option, kind) for t in tables]
        if len(chosen) not in (1, in_chans):
            chosen = [choose_limits(everything, option, kind)]
        decoding = Decoding(decoding.rules, tuple(chosen), kind)
    images = Images(wide, weights, kind, len(files), everything, tables)
    notes, warnings, facts = describe(images, decoding, option, known=known)
    return RangeChoice(decoding, tuple(notes), tuple(warnings), facts)


def choose_scan_range(
    probes: Mapping[str, "Probe"], decoding: Decoding | None, option: Sequence[str], in_chans: int
) -> RangeChoice:
    """Choose the range of scanned images; the notes also say what is done with their colour profiles.

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
    found = choose_range(values, decoding or SRGB, option, in_chans, known=decoding is not None)
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
