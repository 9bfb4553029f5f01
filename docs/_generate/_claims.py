"""Tables of the papers' claims: what was compared, by how much it differs, and what two procedures decide."""

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from _tables import Row, table

# before this folder, which has a papers.py of its own
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from papers import looks
from papers.claims import Claim
from papers.schedule import values_of
from papers.verdicts import DECIDED, Outcome, Verdict, holm, judge

Key = tuple[str, str, str]
"""Paper, experiment and images."""


@dataclass(frozen=True)
class Judged:
    """A claim on one set of images.

    Attributes:
        claim: what is said.
        data: name of the images.
        outcome: its numbers, and the verdict of its own test.
        after_holm: the verdict when all claims count.
    """

    claim: Claim
    data: str
    outcome: Outcome
    after_holm: Verdict


def judge_all(rows: Mapping[Key, Sequence[Row]], claims: Sequence[Claim]) -> list[Judged]:
    """Judge every claim on all images that its experiment was run on, and all of them together.

    A claim that was run on none counts once, so that its run cannot change what was decided before.
    """
    datas = list(dict.fromkeys(data for _, _, data in rows))
    found = []
    for claim in claims:
        own = [data for data in datas if (claim.paper, claim.experiment, data) in rows]
        for data in own or datas[:1]:
            values = values_of(rows.get((claim.paper, claim.experiment, data), ()))
            found.append((claim, data, judge(claim, values.get(claim.metric, {}))))
    after = holm([outcome for _, _, outcome in found])
    return [Judged(*one, verdict) for one, verdict in zip(found, after, strict=True)]


def counts(judged: Sequence[Judged]) -> str:
    """Say in one sentence how many claims were shown."""

    def of(verdict: str) -> tuple[int, int]:
        own = [one for one in judged if one.outcome.verdict == verdict]
        return len(own), sum(one.after_holm == verdict for one in own)

    (shown, still), (reverse, reverse_still) = of("shown"), of("reversed")
    tests = sum(one.outcome.look > 0 for one in judged)
    if not tests:
        return f"No claim has the {looks.SEEDS[0]} seeds of a first look yet."
    neither = tests - shown - reverse
    says = [f"{n} {'shows' if n == 1 else 'show'}" for n in (shown, reverse, neither)]
    return (
        f"Of {tests} tests, {says[0]} what the paper says ({still} also after Holm), {says[1]} the reverse "
        f"({reverse_still} also after Holm), and {says[2]} neither."
    )


def power(judged: Sequence[Judged], names: Mapping[str, str]) -> str:
    """Say how large differences each test that shows neither, and half of them, would have shown; "" without any."""
    neither = [one for one in judged if one.outcome.verdict == "not shown here"]
    points = [one for one in neither if one.claim.scale == "difference" and names[one.claim.metric].endswith("%")]
    ratios = [one for one in neither if one.claim.scale == "ratio"]
    parts = []
    for own, unit in ((points, " points"), (ratios, " (ratio)")):
        if own:
            detectable = [one.outcome.detectable for one in own]
            most, half = (
                _detectable(own[0].claim, names[own[0].claim.metric], value)
                for value in (max(detectable), statistics.median_high(detectable))
            )
            parts.append(f"{most}{unit} in all of {len(own)}, {half}{unit} in half of them")
    return f"With a chance of 80 %, true differences would have shown of {'; '.join(parts)}." if parts else ""


def summary(judged: Sequence[Judged], papers: Mapping[str, str]) -> str:
    """Return a table of the verdicts, a row for each claim and a column for each set of images."""
    datas = list(dict.fromkeys(one.data for one in judged))
    lines: dict[Claim, list[str]] = {}
    for one in judged:
        cells = lines.setdefault(one.claim, [papers[one.claim.paper], one.claim.text, *("–" for _ in datas)])
        cells[2 + datas.index(one.data)] = _cell(one)
    return table(["paper", "claim", *datas], lines.values(), left=2 + len(datas))


def claims_table(judged: Sequence[Judged], names: Mapping[str, str]) -> str:
    """Return the numbers of claims on one set of images."""
    lines = []
    for one in judged:
        claim, outcome = one.claim, one.outcome
        name = names[claim.metric]
        what = f"{name}: {claim.variant} {'/' if claim.scale == 'ratio' else '−'} {claim.against}"
        if not outcome.look:
            lines.append([claim.text, what, outcome.verdict, "", _pairs(outcome), "", "", ""])
            continue
        difference, low, high = (_size(claim, name, x) for x in (outcome.difference, outcome.low, outcome.high))
        lines.append([
            claim.text, what, f"**{outcome.verdict}**", one.after_holm, _pairs(outcome),
            f"{difference} ({low} to {high})",
            _probability(outcome.p), _detectable(claim, name, outcome.detectable),
        ])  # fmt: skip
    head = ["claim", "compared", "verdict", "after Holm", "seeds", "mean (interval)", "p", "detectable"]
    return table(head, lines, left=4)


def attempts(judged: Sequence[Judged]) -> list[str]:
    """Return what was tried for claims that are not shown, a line for each text however many claims and images."""
    texts: dict[str, dict[str, None]] = {}
    for one in judged:
        if one.claim.tried and one.outcome.look and one.outcome.verdict != "shown":
            texts.setdefault(one.claim.tried, {})[one.claim.text] = None
    return [f"- {'; '.join(claims)}: {tried}" for tried, claims in texts.items()]


def number(name: str, value: float, like: float | None = None) -> str:
    """Return a value of a metric by the metric's name: where that ends in %, the value is a share.

    Args:
        name: of the metric, as the page has it.
        value: the number.
        like: a number whose decimals it gets; its own where None.
    """
    share = name.endswith("%")
    size = abs(value if like is None else like)
    text = f"{abs(value) * (100 if share else 1):.{1 if share or size >= 10 else 3}f}"
    return f"−{text}" if value < 0 and float(text) else text


def _cell(one: Judged) -> str:
    verdict = one.outcome.verdict
    if verdict not in DECIDED:
        return verdict
    return f"**{verdict}**" if one.after_holm == verdict else f"**{verdict}**, not after Holm"


def _pairs(outcome: Outcome) -> str:
    """Return the pairs of seeds, and how many more gave no number to compare."""
    return f"{outcome.seeds}" + (f", {outcome.dropped} without" if outcome.dropped else "")


def _size(claim: Claim, name: str, value: float) -> str:
    """Return a difference with its sign, or a ratio."""
    if claim.scale == "ratio":
        return f"×{value:.2f}" if 0.1 <= value < 100 else f"×{value:.2g}"
    size = number(name, value)
    return f"+{size}" if value > 0 and float(size) else size


def _detectable(claim: Claim, name: str, value: float) -> str:
    """Return a detectable difference, without sign and rounded up."""
    if claim.scale == "ratio":
        return f"×{math.ceil(value * 100 - 1e-9) / 100:.2f}"
    return number(name, math.ceil(value * 1000 - 1e-9) / 1000)


def _probability(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < looks.LEVEL else f"{p:.2f}"
