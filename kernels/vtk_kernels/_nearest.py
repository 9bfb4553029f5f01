"""The measured shape nearest to another one, and from which number of rows on it is a different one.

A shape (rows, n, k) is seen as two quantities. Of a product they are the elements of its output, rows · n, which are
its tiles and what an epilogue saves of traffic, and the length k of its sums; of attention the heads of all images,
rows · k, which are its programs, and the tokens n. Their product is proportional to the FLOPs. Shapes with equal
quantities fill a card alike: the fc1 of S/16 at batch 8 is one of S18×2 at batch 4 in this sense. The distance of two
shapes is the sum of the absolute logarithms of both quantities' factors.

A shape speaks for another one while neither quantity differs by more than `REACH`. Of the 39 measurements on an H200 at
commit fd6ca4a, each held against its nearest neighbour within that reach, choosing as the neighbour did lost 0.5 % of
attention's time on average (the default 29 %), 2.8 % of split-K's (12.5 %) and 0.5 % of linear_gelu's (0.5 %); all but
one had such a neighbour. Models from T to L at usual batches lie within it; beyond, nothing is known.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

REACH = 4.0
"""Largest factor between two shapes in either quantity."""

OTHER = 2.0
"""What was measured in the other half type, with other versions or on a related card counts as further away by this."""

_EPSILON = 1e-9
_ATTENTION = ("packed_attention", "rotary_attention", "kept_attention")


@dataclass(frozen=True)
class Candidate:
    """An entry that may speak for the shapes of one n and k, whatever their rows.

    Attributes:
        entry: of a table.
        table: its name.
        level: of the table, 0 for the upper one.
        differs: in what else the entry differs: "type", "version", "card".
        at: logarithm of the rows at which the first quantities are equal.
        away: distance there, with a factor of `OTHER` for each difference.
        preference: between equal distances: the upper table, the same n and k, the newer versions.
    """

    entry: dict[str, Any]
    table: str
    level: int
    differs: tuple[str, ...]
    at: float
    away: float
    preference: tuple[Any, ...]


def quantities(op: str, rows: int, n: int, k: int) -> tuple[int, int]:
    """Return the two quantities of a shape."""
    return (rows * k, n) if op in _ATTENTION else (rows * n, k)


def candidate(
    op: str, n: int, k: int, entry: dict[str, Any], table: str, level: int, differs: tuple[str, ...]
) -> Candidate | None:
    """Return an entry as a candidate for shapes of this n and k, None where it is out of reach of all of them."""
    if min(n, k) < 1:
        return None
    one, second = quantities(op, 1, n, k)
    first, measured = quantities(op, entry["rows"], entry["n"], entry["k"])
    factor = abs(math.log(second / measured))
    if factor > math.log(REACH) + _EPSILON:
        return None
    difference = abs(math.log(n / entry["n"])) + abs(math.log(k / entry["k"]))
    preference = (level, difference, [-part for part in versions(entry)])
    return Candidate(
        entry, table, level, differs, math.log(first / one), factor + len(differs) * math.log(OTHER), preference
    )


def versions(entry: dict[str, Any]) -> list[int]:
    """Return the versions of torch and Triton of an entry as numbers.

    Raises:
        ValueError: they are not numbers.
    """
    return [int(part) for version in (entry["torch"], entry["triton"]) for part in version.split(".")]


def nearest(candidates: Iterable[Candidate], rows: int) -> Candidate | None:
    """Return the candidate nearest to a number of rows, None where none is within reach."""
    if rows < 1:
        return None
    at = math.log(rows)
    ranks = [
        (round(abs(at - c.at) + c.away, 9), c.preference, i, c)
        for i, c in enumerate(candidates) if abs(at - c.at) <= math.log(REACH) + _EPSILON
    ]  # fmt: skip
    return min(ranks)[-1] if ranks else None


def pieces(candidates: tuple[Candidate, ...], default: str) -> tuple[tuple[int, str], ...]:
    """Return the choice as a function of the rows: pairs (end, choice), ascending, each for rows below its end.

    From the last end on, the default holds. Where candidates' distances cross, or their reach ends, it may change.

    Args:
        candidates: what was measured.
        default: where no candidate is within reach.
    """
    limits = [c.at + side * math.log(REACH) for c in candidates for side in (-1, 1)]
    crossings = [
        (a.at + b.at + (b.away - a.away if a.at <= b.at else a.away - b.away)) / 2
        for a, b in itertools.combinations(candidates, 2) if a.entry["choice"] != b.entry["choice"]
    ]  # fmt: skip
    starts = {1} | {max(1, math.floor(math.exp(x)) + i) for x in (*limits, *crossings) for i in (0, 1, 2)}
    found: list[tuple[int, str]] = []
    choice = default
    for start in sorted(starts):
        near = nearest(candidates, start)
        after = default if near is None else near.entry["choice"]
        if after != choice:
            found.append((start, choice))
            choice = after
    return tuple(found)
