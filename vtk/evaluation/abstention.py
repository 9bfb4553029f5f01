"""Chooses the score below which a model's answer is "unknown", from the errors of held-out images.

A threshold is right for a risk if the upper confidence bound of the share of errors among the images that reach it
(Clopper and Pearson, 1934) is at most that risk. The candidates are given numbers of images, each 5 % more than the one
before, which no label decides; the one that accepts most is taken. Each holds with probability 1 − δ. Taking the most
lenient of them is a choice among many; how much that costs depends on how the errors rise as the scores fall. Where
they rise as in trained classifiers, the chosen one exceeded the risk in 4 to 10 % of simulated draws at δ = 10 %. Where
scores said nothing of the errors it was 30 %, so that there only one candidate is left: to accept every image.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from vtk.calibration import Calibration, Threshold
from vtk.card import Card
from vtk.errors import UsageError

RISK = 0.02
"""Default of ``--risk``."""

DELTA = 0.1
"""Probability with which the share of errors may be larger than the risk."""

_FIRST, _GROWTH = 20, 1.05
_NO_ERRORS = (22, 45, 114, 230, 460)
"""Images of which none may be wrong, at risks of 10, 5, 2, 1 and 0.5 % and δ = 10 %."""
_NORMAL95 = 1.6448536269514722
_HALVINGS = 60


def upper_bound(errors: int, count: int, delta: float) -> float:
    """Return the one-sided upper bound of a share, which exceeds the true one with probability 1 − δ at least."""
    if errors >= count:
        return 1.0
    low, high = errors / count, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(errors, count, middle) > delta else (low, middle)
    return high


def _at_most(errors: int, count: int, share: float) -> float:
    """Return the probability of at most so many errors if each image is wrong with probability ``share``."""
    if not 0 < share < 1:
        return float(share <= 0)
    k = np.arange(errors + 1)
    ways = np.concatenate([[0.0], np.cumsum(np.log(count - k[:-1]) - np.log(k[1:]))])  # ln of binomial coefficients
    return float(np.exp(ways + k * math.log(share) + (count - k) * math.log1p(-share)).sum())


def fewest_images(risk: float, delta: float = DELTA) -> int:
    """Return how many images, all of them right, show that no more than ``risk`` are wrong: 114 for 2 %."""
    return math.ceil(math.log(delta) / math.log1p(-risk) - 1e-9)


def score_rows(confidence: np.ndarray, right: np.ndarray) -> tuple[list[float], list[int], list[int]]:
    """Return candidates for a threshold: falling scores, how many images reach each, and how many of these are wrong.

    Args:
        confidence: scores (images,); compared in fp32, as the back-ends give them.
        right: (images,), whether each answer is right.
    """
    scores = confidence.astype(np.float32)
    order = np.argsort(-scores, kind="stable")
    scores, errors = scores[order], np.cumsum(~right[order])
    count, rows = len(scores), dict[int, float]()
    for reached in _counts(count):
        # images of one score are accepted together
        while reached and reached < count and scores[reached] == scores[reached - 1]:
            reached -= 1
        if reached == count:
            rows[reached] = 0.0
        elif reached:
            middle = np.float32((float(scores[reached - 1]) + float(scores[reached])) / 2)
            rows[reached] = float(middle if middle > scores[reached] else scores[reached - 1])
    accepted = sorted(rows)
    return [rows[n] for n in accepted], accepted, [int(errors[n - 1]) for n in accepted]


def _counts(count: int) -> list[int]:
    found, now = {n for n in _NO_ERRORS if n < count}, _FIRST
    while now < count:
        found.add(now)
        now = max(now + 1, round(now * _GROWTH))
    return [*sorted(found), count]


def choose_threshold(calibration: Calibration | None, risk: float, name: str, *, delta: float = DELTA) -> Threshold:
    """Return the threshold that accepts most images at a risk.

    Args:
        calibration: of the model's card.
        risk: largest share of errors among the answers given, above 0 and below 1.
        name: of the model, for messages.
        delta: probability with which the share may be larger.

    Raises:
        UsageError: no scores of held-out images, too few of them, or no threshold with so few errors.
    """
    if calibration is None or not calibration.scores:
        raise UsageError(
            f"`--threshold auto` needs the scores of held-out images, and the card of {name} has none: it was written "
            "by an earlier vtk, or its weights were changed after training; `vtk tasks calibrate PACK --data FOLDER` "
            "adds them"
        )
    least = fewest_images(risk, delta)
    if calibration.scored < least:
        enough = 1 - delta ** (1 / calibration.scored)
        raise UsageError(
            f"`--risk` {risk:g} takes {least} held-out images at least, and {name} has the scores of "
            f"{calibration.scored}, enough for --risk {math.ceil(1000 * enough) / 1000:g} if all are right; calibrate "
            "on more, or allow a larger risk"
        )
    rows = list(zip(calibration.scores, calibration.accepted, calibration.errors, strict=True))
    if not _scores_tell(calibration.accepted, calibration.errors):
        rows = rows[-1:]
    # the bound is at most the risk where so few errors are so improbable at that risk
    chosen = next((row for row in reversed(rows) if _at_most(row[2], row[1], risk) <= delta), None)
    if chosen is None:
        bounds = [upper_bound(errors, accepted, delta) for _, accepted, errors in rows]
        raise UsageError(
            f"`--risk` {risk:g}: no score of {name} is reached with so few errors, by its {calibration.scored} "
            f"held-out images; the smallest risk with a threshold is {math.ceil(1000 * min(bounds)) / 1000:g}"
        )
    score, accepted, errors = chosen
    upper = min(upper_bound(errors, accepted, delta), risk)
    return Threshold(score, risk, delta, calibration.scored, accepted / calibration.scored, upper)


def with_threshold(card: Card, threshold: float | str | None, risk: float | None, name: str) -> Card:
    """Return the card with the threshold that ``--threshold`` and ``--risk`` ask for; without ``auto`` with none.

    Args:
        card: of the model.
        threshold: ``auto``; of anything else the card gets none.
        risk: largest share of errors; by default that of the card's own threshold, else 0.02.
        name: of the model, for messages.

    Raises:
        UsageError: a multi-label model, or as `choose_threshold`.
    """
    if threshold != "auto":
        return dataclasses.replace(card, threshold=None)
    if card.multi_label:
        raise UsageError(
            f"`--threshold auto` is for models with one label per image, and {name} is multi-label: an image without "
            "a label above --threshold NUMBER has none already"
        )
    if risk is None and card.threshold is not None:
        return card
    chosen = choose_threshold(card.calibration, RISK if risk is None else risk, name)
    return dataclasses.replace(card, threshold=chosen)


def describe(threshold: Threshold) -> str:
    """Return a threshold in words."""
    return (
        f'"unknown" where the score is below {threshold.score:.4g}: of {threshold.count} held-out images '
        f"{100 * threshold.coverage:.1f} % reach it, of which at most {100 * threshold.upper:.2f} % are wrong "
        f"(bound at {100 * (1 - threshold.delta):g} %; --risk {threshold.risk:g})"
    )


def _scores_tell(accepted: Sequence[int], errors: Sequence[int]) -> bool:
    """Return whether errors are more frequent at low scores (rank-sum test of Mann and Whitney, one-sided, 5 %)."""
    images = np.diff(np.array([0, *accepted], dtype=np.float64))
    wrong = np.diff(np.array([0, *errors], dtype=np.float64))
    right, total = images - wrong, images.sum()
    pairs = wrong.sum() * right.sum()
    if not pairs:
        return False
    above = np.cumsum(right) - right
    statistic = float((wrong * (above + right / 2)).sum())
    ties = float((images**3 - images).sum()) / (total * (total - 1))
    deviation = math.sqrt(max(pairs / 12 * (total + 1 - ties), 1e-12))
    return (statistic - pairs / 2) / deviation > _NORMAL95
