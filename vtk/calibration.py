"""Calibration of a model's probabilities, and the score below which its answer is "unknown", as a card keeps them."""

import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """The temperature of a model, and how often it is right at which score.

    The score of an image is the largest of softmax(logits / temperature).

    Attributes:
        temperature: divisor of all logits before the softmax; 1 where none was better on the judging half.
        count: held-out images that fitted it.
        judged: held-out images that judged it, none of them among those that fitted it; `nll_before` to
            `ece_by_chance` are theirs.
        nll_before: mean −ln of the label's probability at temperature 1, nats.
        nll_after: the same at ``temperature``.
        ece_before: expected calibration error at temperature 1, in 15 bins of equal width; 0 to 1.
        ece_after: the same at ``temperature``.
        ece_by_chance: 95th percentile of the error of a calibrated model with the scores after it, on as many images.
        scored: held-out images behind the three columns that follow.
        scores: falling scores that may become a threshold.
        accepted: of each, how many of the ``scored`` images reach it.
        errors: of each, how many of these are wrong.
    """

    temperature: float
    count: int
    judged: int
    nll_before: float
    nll_after: float
    ece_before: float
    ece_after: float
    ece_by_chance: float
    scored: int = 0
    scores: tuple[float, ...] = ()
    accepted: tuple[int, ...] = ()
    errors: tuple[int, ...] = ()

    def fault(self) -> str | None:
        """Return what is impossible in it; None where nothing is."""
        if not math.isfinite(self.temperature) or not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            return f"`calibration.temperature` is {self.temperature}; it is from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
        shown = (self.nll_before, self.nll_after, self.ece_before, self.ece_after, self.ece_by_chance)
        if not all(math.isfinite(number) and number >= 0 for number in shown):
            return "`calibration` has an error that is negative or no number"
        if min(self.count, self.judged, self.scored) < 0:
            return "`calibration` has a negative number of images"
        if len({len(self.scores), len(self.accepted), len(self.errors)}) > 1 or len(self.scores) > MAX_ROWS:
            return f"`calibration.scores`, `accepted` and `errors` must have one length, at most {MAX_ROWS}"
        rows = list(zip(self.scores, self.accepted, self.errors, strict=True))
        if not all(0 <= s <= 1 and 0 <= e <= n <= self.scored for s, n, e in rows):
            return "`calibration` has a row of scores that is impossible"
        for (s, n, e), (next_s, next_n, next_e) in itertools.pairwise(rows):
            if not (next_s < s and n < next_n and 0 <= next_e - e <= next_n - n):
                return "`calibration.scores` must fall, and `accepted` and `errors` grow with them"
        return None


@dataclass(frozen=True)
class Threshold:
    """The score below which a model's answer is "unknown".

    Attributes:
        score: smallest score (`Calibration`) of an answer that is given.
        risk: largest share of errors among the answers given.
        delta: probability with which the share may be larger, over draws of the images that chose it.
        count: images that chose it.
        coverage: share of these that reach it.
        upper: upper confidence bound (Clopper and Pearson) of the share of errors among such images; at most ``risk``.
    """

    score: float
    risk: float
    delta: float
    count: int
    coverage: float
    upper: float

    def fault(self) -> str | None:
        """Return what is impossible in it; None where nothing is."""
        values = (self.score, self.risk, self.delta, self.coverage, self.upper)
        if not all(math.isfinite(number) and 0 <= number <= 1 for number in values) or self.count < 1:
            return "`threshold` has a number that is no share between 0 and 1, or no images"
        return None


MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
"""Limits of a temperature: beyond them all probabilities are equal, or 0 and 1."""

MAX_ROWS = 256
"""Most rows of scores in a card."""
