"""``--rank auto``: packs of growing size on the images that choose, and the smallest within the allowed drop."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from vtk.errors import VerificationError
from vtk.packs.compression.answers import Answers
from vtk.packs.compression.changes import threshold_for
from vtk.packs.compression.drop import DropMetric, agreement, points, value_of
from vtk.packs.compression.held_out import HeldOut
from vtk.packs.compression.trial import Trial

MEAN_RANKS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Mean ranks that are tried, from the smallest on."""

ENOUGH = 3
"""Candidates in a row within the bound, after which larger ones are not tried."""

LEAST_LIKENESS = 0.95
"""Least share of the logits' variance that must stay where accuracy alone cannot tell."""


@dataclass(frozen=True)
class Rule:
    """What a candidate must keep.

    Attributes:
        metric: that may drop.
        max_drop: by how much, as a fraction.
        few: one image weighs more than ``max_drop``: the logits must be close, too (`LEAST_LIKENESS`).
    """

    metric: DropMetric
    max_drop: float
    few: bool = False

    def allows(self, drop: float, likeness: float) -> bool:
        """Return whether a drop is within the bound."""
        return drop <= self.max_drop + 1e-12 and (not self.few or likeness >= LEAST_LIKENESS)


@dataclass(frozen=True)
class Candidate:
    """A compressed pack, measured on the images that choose.

    Attributes:
        mean_rank: its numbers are those of this rank in every matrix.
        threshold: of the components.
        nbytes: of its tensors.
        drop: of the metric, as a fraction.
        fitted: the drop, smoothed: a larger pack drops less, whatever single images say.
        agreement: share of the images that are decided alike.
        likeness: 1 - squared error / variance of the full pack's logits.
    """

    mean_rank: int
    threshold: float
    nbytes: int
    drop: float
    fitted: float
    agreement: float
    likeness: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dict(vars(self))


def measure(trial: Trial, held: HeldOut, before: Answers, rule: Rule, others: int) -> tuple[Candidate, ...]:
    """Measure packs of growing size, until some in a row are within the bound or factors save nothing more.

    Args:
        trial: cuts the packs.
        held: images.
        before: the full pack's answers for those that choose.
        rule: what is allowed.
        others: bytes of the pack's tensors that are not cut.
    """
    found: list[Candidate] = []
    value, within = value_of(before, rule.metric), 0
    for rank in MEAN_RANKS:
        threshold = threshold_for(trial.changes, rank)
        factors = trial.stored(trial.cut(threshold))
        size = trial.nbytes(factors, others)
        if not factors or (found and size <= found[-1].nbytes):
            break
        after = held.choosing_answers(trial.show(factors), f"mean rank {rank}")
        drop, alike = value - value_of(after, rule.metric), likeness(before.logits, after.logits)
        found.append(Candidate(rank, threshold, size, drop, drop, agreement(before, after) / len(before), alike))
        within = within + 1 if rule.allows(drop, alike) else 0
        if within == ENOUGH:
            break
    fits = smooth([candidate.drop for candidate in found])
    return tuple(replace(candidate, fitted=fit) for candidate, fit in zip(found, fits, strict=True))


def pick(candidates: Sequence[Candidate], rule: Rule, images: int) -> Candidate:
    """Return the smallest candidate whose fitted drop is within the bound.

    Raises:
        VerificationError: there is none.
    """
    for candidate in candidates:
        if rule.allows(candidate.fitted, candidate.likeness):
            return candidate
    last = f"; the largest, of mean rank {candidates[-1].mean_rank}, drops by {points(candidates[-1].drop)}"
    raise VerificationError(
        f"`--rank auto`: none of {len(candidates)} packs is within {points(rule.max_drop)} points on the {images} "
        f"images that choose{last if candidates else ''}; give a larger --max-drop, or --rank R"
    )


def smooth(drops: Sequence[float]) -> list[float]:
    """Return the closest drops that never rise with the size of the pack (pool-adjacent-violators).

    Without this, the smallest of many candidates would be chosen that is better by chance.
    """
    pools: list[tuple[float, int]] = []  # sum and number
    for drop in drops:
        total, count = drop, 1
        while pools and total * pools[-1][1] > pools[-1][0] * count:
            total, count = total + pools[-1][0], count + pools[-1][1]
            pools.pop()
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


def likeness(before: Tensor, after: Tensor) -> float:
    """Return 1 - squared error / variance of logits (n, classes) over the images; of one image, over its logits."""
    first, second = before.double(), after.double()
    spread = float((first - (first.mean(dim=0) if len(first) > 1 else first.mean())).square().sum())
    off = float((second - first).square().sum())
    return 1.0 if off == 0 else 1 - off / spread if spread else 0.0
