"""``--rank auto``: packs of several sizes on the images that choose, and the smallest within the allowed drop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vtk.errors import VerificationError
from vtk.packs.compression.answers import Answers
from vtk.packs.compression.changes import threshold_for
from vtk.packs.compression.drop import DropMetric, agreement, compare, points
from vtk.packs.compression.expected import expected_value, probabilities
from vtk.packs.compression.held_out import HeldOut
from vtk.packs.compression.trial import Trial

_FIRST = 4

LEAST_LIKENESS = 0.95
"""Least share of the logits' variance that must stay where accuracy alone cannot tell."""


@dataclass(frozen=True)
class Candidate:
    """A compressed pack, measured on the images that choose.

    Attributes:
        mean_rank: its numbers are those of this rank in every matrix.
        threshold: of the components.
        nbytes: of its tensors.
        drop: of the metric, as a fraction.
        low: lower limit of its 95 % interval.
        expected: drop (`vtk.packs.compression.expected`).
        agreement: share of the images that are decided alike.
        likeness: 1 - squared error / variance of the full pack's logits.
    """

    mean_rank: int
    threshold: float
    nbytes: int
    drop: float
    low: float
    expected: float
    agreement: float
    likeness: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dict(vars(self))


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

    def allows(self, candidate: Candidate) -> bool:
        """Return whether the expected drop is within the bound, and the measured one not clearly beyond it."""
        near = not self.few or candidate.likeness >= LEAST_LIKENESS
        most = self.max_drop + 1e-12  # sums of probabilities round
        return near and candidate.expected <= most and candidate.low <= most


def search(trial: Trial, held: HeldOut, before: Answers, rule: Rule, others: int) -> tuple[Candidate, ...]:
    """Measure packs of doubling mean rank until one is allowed, then between that and the one before.

    Args:
        trial: cuts the packs.
        held: images.
        before: the full pack's answers for those that choose.
        rule: what is allowed.
        others: bytes of the pack's tensors that are not cut.

    Returns:
        The candidates, from the smallest to the largest.
    """
    truth = probabilities(before)
    value = expected_value(before, truth, rule.metric)
    found: dict[int, Candidate] = {}

    def allowed(rank: int) -> bool:
        threshold = threshold_for(trial.changes, rank)
        factors = trial.stored(trial.cut(threshold))
        if not factors:
            return True  # all matrices are exact
        after = held.choosing_answers(trial.show(factors), f"mean rank {rank}")
        against = compare(before, after, rule.metric)
        found[rank] = Candidate(
            rank, threshold, trial.nbytes(factors, others), against.drop, against.low,
            value - expected_value(after, truth, rule.metric), agreement(before, after) / len(before),
            likeness(before.logits, after.logits),
        )  # fmt: skip
        return rule.allows(found[rank])

    full = max(min(change.shape) for change in trial.changes.values())
    small, large = 0, min(_FIRST, full)
    while not allowed(large):
        if large == full:
            return tuple(found[rank] for rank in sorted(found))
        small, large = large, min(2 * large, full)
    while large - small > 1:
        middle = (small + large) // 2
        small, large = (small, middle) if allowed(middle) else (middle, large)
    return tuple(found[rank] for rank in sorted(found))


def pick(candidates: Sequence[Candidate], rule: Rule, images: int) -> Candidate:
    """Return the smallest candidate that is allowed.

    Raises:
        VerificationError: there is none.
    """
    for candidate in candidates:
        if rule.allows(candidate):
            return candidate
    if not candidates:
        raise VerificationError("`--rank auto`: factors of rank 1 would take more bytes than the matrices themselves")
    last = candidates[-1]
    raise VerificationError(
        f"`--rank auto`: no pack is within {points(rule.max_drop)} points on the {images} images that choose; of the "
        f"largest, of mean rank {last.mean_rank}, the expected drop is {points(last.expected)} and the measured one "
        f"{points(last.drop)}; give a larger --max-drop, or --rank R"
    )


def likeness(before: Tensor, after: Tensor) -> float:
    """Return 1 - squared error / variance of logits (n, classes) over the images; of one image, over its logits."""
    first, second = before.double(), after.double()
    spread = float((first - (first.mean(dim=0) if len(first) > 1 else first.mean())).square().sum())
    off = float((second - first).square().sum())
    return 1.0 if off == 0 else 1 - off / spread if spread else 0.0
