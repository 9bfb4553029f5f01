"""Counts the images that a threshold answers in an evaluation, and how many of these answers are wrong."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vtk import console
from vtk.calibration import Threshold
from vtk.card import Card
from vtk.evaluation.abstention import describe, upper_bound
from vtk.evaluation.labels import probabilities


@dataclass(frozen=True)
class Abstained:
    """Answers above and below a threshold.

    Attributes:
        threshold: of the card.
        count: images.
        answered: of these, with a score that reaches it.
        wrong: of the answers.
        confusion: (n, n + 1) int64 counts, [true, predicted]; the last column are the unknown ones.
    """

    threshold: Threshold
    count: int
    answered: int
    wrong: int
    confusion: np.ndarray

    @property
    def coverage(self) -> float:
        """Share of images with an answer."""
        return self.answered / self.count

    @property
    def error(self) -> float | None:
        """Share of wrong answers; None without answers."""
        return self.wrong / self.answered if self.answered else None

    @property
    def unknown(self) -> np.ndarray:
        """(n,) how many images of each class are unknown."""
        column: np.ndarray = self.confusion[:, -1]
        return column

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "threshold": asdict(self.threshold), "answered": self.answered, "unknown": self.count - self.answered,
            "coverage": self.coverage, "error": self.error, "unknown_per_class": self.unknown.tolist(),
        }  # fmt: skip

    def print(self, *, chosen_on_these: bool) -> None:
        """Print coverage and error, and whether chance explains an error above the risk.

        Args:
            chosen_on_these: whether these are the images that chose the threshold.
        """
        console.say(describe(self.threshold))
        if self.error is None:
            console.say(f"no image of {self.count} is answered")
            return
        line = (
            f"answered: {console.percent(self.coverage)} of {console.count(self.count, 'image')}, "
            f"{console.percent(self.error, 2)} of the answers wrong ({self.wrong} of {self.answered})"
        )
        # P(so many or more) at the risk is at most 5 % where the lower bound of the error is above the risk
        if self.wrong and 1 - upper_bound(self.answered - self.wrong, self.answered, 0.05) > self.threshold.risk:
            console.warn(
                f"{line}; chance does not explain that it is above the risk: are these images of another kind?"
            )
        else:
            same = "; these images chose the threshold, others say more" if chosen_on_these else ""
            console.say(f"{line}{same}")


class AnswerCounter:
    """Counts the answers of an evaluation above and below a threshold.

    Args:
        card: of the model, with a threshold.
    """

    def __init__(self, card: Card) -> None:
        assert card.threshold is not None
        self._card, self._threshold = card, card.threshold
        self._table = np.zeros((len(card.classes), len(card.classes) + 1), dtype=np.int64)

    def keep(self, logits: Tensor, labels: Tensor) -> None:
        """Take the logits (B, classes) and labels (B,) of the next batch."""
        score, best = probabilities(self._card, logits).max(dim=1)
        said = torch.where(score < self._threshold.score, len(self._card.classes), best)
        np.add.at(self._table, (labels.numpy(), said.cpu().numpy()), 1)

    def result(self) -> Abstained:
        """Return the counts."""
        answered = self._table[:, :-1]
        wrong = int(answered.sum() - np.trace(answered))
        return Abstained(self._threshold, int(self._table.sum()), int(answered.sum()), wrong, self._table)
