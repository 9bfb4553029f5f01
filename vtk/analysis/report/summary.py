"""Summary of one analysis or two: key numbers, suggested changes, cautions."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from vtk.analysis.config import AnalyzeConfig
from vtk.analysis.diagnostics import NAMES, diagnostic
from vtk.analysis.result_files import Analysis

LETTERS = ("A", "B")
"""Names of two models in tables."""

DASH = "–"
_SHOWN = 4  # maximum number of diagnostics in a caution
_OWN = {field.name.replace("_", "-") for field in fields(AnalyzeConfig)} - {"model"}
_CODE = re.compile(r"`([^`]*)`")


def diagnostics_of(analyses: Sequence[Analysis]) -> list[str]:
    """Return the diagnostics that at least one analysis has, in the report's order."""
    return [name for name in NAMES if any(name in one.results for one in analyses)]


def refusals(analyses: Sequence[Analysis]) -> list[str]:
    """Return the diagnostics that at least one analysis could not measure, in the report's order."""
    known = {name for one in analyses for name in one.refused}
    return [name for name in NAMES if name in known] + sorted(known - set(NAMES))


def headline(analyses: Sequence[Analysis]) -> dict[str, dict[str, list[float | None]]]:
    """Return, by diagnostic and name of number, the value of each analysis; None if it has none."""
    numbers_of: dict[str, dict[str, list[float | None]]] = {}
    for name in diagnostics_of(analyses):
        own = [diagnostic(name).numbers(one.results[name]) if name in one.results else {} for one in analyses]
        keys = dict.fromkeys(key for numbers in own for key in numbers)
        numbers_of[name] = {key: [_known(numbers.get(key)) for numbers in own] for key in keys}
    return numbers_of


def number_text(value: float | None, *, sign: bool = False) -> str:
    """Return a number with four digits, or a dash for None; ``sign`` adds a plus to positive numbers."""
    if value is None:
        return DASH
    plain = f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"
    digits, _, exponent = plain.partition("e")
    text = (f"{digits}e{int(exponent)}" if exponent else digits).replace("-", "−")
    return f"+{text}" if sign and value > 0 else text


def difference(values: Sequence[float | None]) -> float | None:
    """Return the second value minus the first; None if one is not known."""
    first, second = values
    return None if first is None or second is None else second - first


def advice(analysis: Analysis) -> dict[str, str]:
    """Return the suggested changes of the readings, by diagnostic.

    A sentence is a suggestion if it names a command other than ``vtk analyze``, or an option of another command. The
    sentence before it, which gives the reason, is included.
    """
    suggestions = {}
    for name in diagnostics_of([analysis]):
        sentences = diagnostic(name).read(analysis.results[name])
        acting = {i for i, sentence in enumerate(sentences) if suggests(sentence)}
        kept = sorted(acting | {i - 1 for i in acting if i > 0})
        if acting:
            suggestions[name] = " ".join(sentences[i] for i in kept)
    return suggestions


def suggests(sentence: str) -> bool:
    """Return whether a sentence of a reading suggests a change, in backticks."""
    return any(_acts(code.split()) for code in _CODE.findall(sentence))


def _acts(words: list[str]) -> bool:
    if not words:
        return False
    if words[0] == "vtk":
        return words[1:2] != ["analyze"]
    return words[0].startswith("--") and words[0].removeprefix("--").partition("=")[0] not in _OWN


def cautions(analyses: Sequence[Analysis]) -> list[str]:
    """Return reasons why two analyses are not comparable number by number; empty if they are."""
    if len(analyses) < 2:
        return []
    first, second = (one.facts for one in analyses)
    sentences = []
    if not _same_images(first, second):
        sentences.append(
            f"The two models were analysed on different images: A on {first.get('images', 'unknown ones')}; B on "
            f"{second.get('images', 'unknown ones')}. Differences may come from the images: analyse both again with "
            "`vtk analyze --compare` on one folder."
        )
    others: dict[str, list[str]] = {}
    for name in diagnostics_of(analyses):
        if not all(name in one.results for one in analyses):
            continue
        a, b = (facts.get("options", {}).get(name, {}) for facts in (first, second))
        for option in sorted({*a, *b}):
            if a.get(option) != b.get(option):
                values = " and ".join(_option(own.get(option)) for own in (a, b))
                others.setdefault(f"`--{option.replace('_', '-')}` {values}", []).append(name)
    for option, names in others.items():
        more = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
        those = f"{', '.join(names[:_SHOWN])}{more}"
        sentences.append(
            f"A and B were analysed with different options: {option} (for {those}). Differences may come from them."
        )
    return sentences


def _same_images(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two analyses took the same images, as far as they took images of one kind."""
    one, two = (facts.get("images digest") for facts in (first, second))
    if isinstance(one, dict) and isinstance(two, dict):
        return all(one[kind] == two[kind] for kind in one.keys() & two.keys()) and bool(one.keys() & two.keys())
    known = [set(found.values()) if isinstance(found, dict) else {found} for found in (one, two)]
    return bool(known[0] & known[1])


def absences(analyses: Sequence[Analysis], name: str) -> list[tuple[int, str]]:
    """Return the analyses without a result of a diagnostic, by index, and the reasons."""
    return [
        (i, one.refused.get(name, "it was not requested")) for i, one in enumerate(analyses) if name not in one.results
    ]


def _option(value: object) -> str:
    if isinstance(value, list):
        return ",".join(str(item) for item in value) or "none"
    return "unknown" if value is None else str(value)


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
