"""Judges claims by paired seeds: two looks of a sequential test for each claim, and Holm's procedure over all.

Variants are compared seed by seed, since both see the same images in the same order. A difference d is
sign · (variant − against), for a ratio sign · log(variant / against).

- **shown**: at 5 seeds or at 10, the mean of d is above 0 beyond the bound of that look (`papers.looks`);
- **reversed**: it is below 0 beyond that bound;
- **not shown here**: neither; how large a true difference would have shown is said beside it.

"As good as" is the same with −margin in place of 0. A look decides by its own seeds: what a later one adds does not
take a verdict back.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from papers import looks
from papers.claims import Claim

Verdict = Literal["shown", "reversed", "not shown here", "too few seeds", "not measured"]
DECIDED = ("shown", "reversed")


@dataclass(frozen=True)
class Outcome:
    """A claim's numbers.

    Attributes:
        verdict: by the rule above.
        seeds: pairs that it rests on.
        look: 1 or 2; 0 before the first.
        difference: mean of variant − against, or the geometric mean of variant / against; NaN without any pair.
        low: lower end of the interval that leaves out what the look decides against; NaN before the first look.
        high: its upper end.
        p: the smallest level at which the looks so far decide; 1 before the first look.
        detectable: true difference, or ratio above 1, that would have shown with a chance of `looks.POWER`; NaN before
            the first look.
        dropped: seeds that have rows of both variants but no number to compare: a run diverged, or a value of a ratio
            is not positive.
    """

    verdict: Verdict
    seeds: int = 0
    look: int = 0
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = 1.0
    detectable: float = math.nan
    dropped: int = 0


def judge(claim: Claim, values: Mapping[str, Mapping[str, float]]) -> Outcome:
    """Judge a claim.

    Args:
        claim: what is said.
        values: variant to seed to value of the claim's metric.
    """
    one, two = values.get(claim.variant, {}), values.get(claim.against, {})
    both = sorted(set(one) & set(two), key=_order)
    pairs = [d for d in (_difference(claim, one[seed], two[seed]) for seed in both) if d is not None]
    dropped = len(set(one) | set(two)) - len(pairs)
    if not pairs:
        return Outcome("not measured", dropped=dropped)
    reached = [count for count in looks.SEEDS if len(pairs) >= count]
    if not reached:
        mean = sum(pairs) / len(pairs)
        return Outcome("too few seeds", len(pairs), difference=_shown_as(claim, mean), dropped=dropped)
    null = 0.0 if claim.margin is None else -_margin(claim)
    statistics = [claim.sign * looks.statistic(pairs[:count], claim.sign * null) for count in reached]
    verdict, look = _decide(statistics)
    used = pairs[: looks.SEEDS[look - 1]]
    mean, half = looks.mean_and_error(used)[0], looks.half_width(used, look)
    return Outcome(
        verdict, len(used), look, *(_shown_as(claim, x) for x in (mean, mean - half, mean + half)),
        looks.sequential_p(statistics), _shown_as(claim, looks.detectable(used, look)), dropped,
    )  # fmt: skip


def holm(outcomes: Sequence[Outcome]) -> list[Verdict]:
    """Return the verdicts that remain when the chance of any wrong one among all is kept at `looks.LEVEL` (Holm 1979).

    Claims that no look was taken at count: what is decided about them later must not change the others.
    """
    order = sorted(range(len(outcomes)), key=lambda i: outcomes[i].p)
    found: list[Verdict] = [outcome.verdict for outcome in outcomes]
    holds = True
    for rank, i in enumerate(order):
        holds = holds and outcomes[i].p <= looks.LEVEL / (len(outcomes) - rank)
        if not holds and found[i] in DECIDED:
            found[i] = "not shown here"
    return found


def _decide(statistics: Sequence[float]) -> tuple[Verdict, int]:
    for look, statistic in enumerate(statistics, 1):
        if abs(statistic) >= looks.bound(look):
            return ("shown" if statistic > 0 else "reversed"), look
    return "not shown here", len(statistics)


def _difference(claim: Claim, one: float, two: float) -> float | None:
    if not (math.isfinite(one) and math.isfinite(two)):
        return None
    if claim.scale == "difference":
        return one - two
    return math.log(one) - math.log(two) if one > 0 and two > 0 else None


def _margin(claim: Claim) -> float:
    """Return the margin as a difference: of a ratio, the logarithm."""
    margin = claim.margin or 0.0
    return margin if claim.scale == "difference" else math.log1p(margin)


def _shown_as(claim: Claim, difference: float) -> float:
    if claim.scale == "difference":
        return difference
    try:
        return math.exp(difference)
    except OverflowError:
        return math.inf


def _order(seed: str) -> tuple[int, str]:
    return (int(seed), seed) if seed.isdecimal() else (0, seed)
