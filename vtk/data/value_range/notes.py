"""Sentences of the audit about images of more than 8 bits, and the same as values for JSON."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vtk.data.decoding.rules import Decoding, show_range, show_value
from vtk.data.value_range.limits import Option
from vtk.data.value_range.values import Quantiles, Values, gather_quantiles, is_outside
from vtk.text import one_line

_FEW = 40
"""Of 256 levels: the audit warns if the middle 98 % of all pixels have fewer."""

_SHOWN = 3
_BANDS_SHOWN = 16


class Images(NamedTuple):
    """The images of a set that have more than 8 bits.

    Attributes:
        values: of each, by its name.
        weights: number of pixels of each.
        type: NumPy's name of the type of all together.
        total: number of all good images, those of 8 bits too.
        all: quantiles of all their bands together.
        bands: quantiles of each band.
    """

    values: Mapping[str, Values]
    weights: np.ndarray
    type: str
    total: int
    all: Quantiles
    bands: Sequence[Quantiles]


def describe(
    images: Images, decoding: Decoding, option: Option, *, known: bool
) -> tuple[list[str], list[str], dict[str, Any]]:
    """Return notes, warnings, and facts for JSON.

    Args:
        images: of the set.
        decoding: with the range.
        option: ``--value-range``.
        known: the range is that of a trained model.
    """
    wide, files = images.values, images.total
    notes: list[str] = []
    warnings: list[str] = []
    types = sorted({values.type for values in wide.values()})
    whole = f"{len(wide)} image{'s' * (len(wide) > 1)} of {', '.join(types)}"
    least, most = images.all.end(0), images.all.end(-1)
    facts: dict[str, Any] = {"type": images.type, "files": len(wide), "min": least, "max": most}
    facts["bands"] = [{"min": t.end(0), "max": t.end(-1)} for t in images.bands]
    facts["range"] = [list(pair) for pair in decoding.ranges]
    text = f"more than 8 bits: {whole}"
    if least is not None and most is not None:
        text += f", values from {show_value(least)} to {show_value(most)}"
    if not decoding.ranges:
        warnings.append(
            f"{text}; the model was trained on 8-bit images and has no value range: each image is scaled by its "
            "own type or values"
        )
        return notes, warnings, facts
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
        notes.append(f"{files - len(wide)} images have 8 bits and are used unchanged, without the value range")
    cut = {name: values for name, values in wide.items() if is_outside(values, decoding)}
    facts["outside"] = list(cut)
    if cut:
        names = ", ".join(f"{one_line(name)} ({_extremes(v)})" for name, v in list(cut.items())[:_SHOWN])
        more = f" and {len(cut) - _SHOWN} more" * (len(cut) > _SHOWN)
        one = len(cut) == 1
        warnings.append(
            f"{len(cut)} image{'' if one else 's'} {'has' if one else 'have'} values outside the value range, which "
            f"are clipped: {names}{more}"
        )
    if invalid := [name for name, values in wide.items() if values.invalid]:
        notes.append(
            f"{len(invalid)} images have NaN, infinite or missing values, for example {one_line(invalid[0])}: "
            "they become 0, infinity 255"
        )
    if not known and len(decoding.ranges) == 1:
        warnings += _few_levels(wide, images.weights, decoding.ranges[0], types)
    return notes, warnings, facts


def _few_levels(
    wide: Mapping[str, Values], weights: np.ndarray, chosen: tuple[float, float], types: Sequence[str]
) -> list[str]:
    """Return a warning for each type of which nearly all pixels use few of the 256 levels."""
    found = []
    for kind in types:
        own = [values.type == kind for values in wide.values()]
        table = gather_quantiles([values for values in wide.values() if values.type == kind], weights[own], None)
        if not len(table.rows):
            continue
        least, most = table.end(0), table.end(-1)
        low, high = (table.percentile(level) for level in (1, 99))
        levels = (high - low) / (chosen[1] - chosen[0]) * 255
        of = f"of the {sum(own)} images of {kind}"
        if least == most:
            found.append(f"all values {of} are {show_value(most or 0.0)}")
        elif levels < _FEW:
            how = "--value-range p1 p99 would spread them" if len(types) == 1 else "store all images as one type"
            found.append(
                f"98 % of the pixels {of} lie in {show_value(low)} to {show_value(high)}, {levels + 1:.0f} of the 256 "
                f"levels; {how}"
            )
    return found


def _extremes(values: Values) -> str:
    known = [band for band in values.bands if band]
    return f"{show_value(min(band[0] for band in known))} to {show_value(max(band[-1] for band in known))}"
