"""Fits a temperature on one half of the held-out images and judges it on the other."""

from collections.abc import Sequence

import numpy as np

from vtk.calibration import Calibration
from vtk.evaluation.abstention import score_rows
from vtk.evaluation.reliability import (
    calibration_error,
    confidence_and_nll,
    error_by_chance,
    fit_temperature,
    reliability_bins,
)

LEAST_IMAGES = 20
"""Held-out images below which no temperature is fitted."""

_PRIOR = 2.0  # nats at a temperature of e: few images do not decide alone


def calibrate(logits: np.ndarray, labels: np.ndarray, fitting: Sequence[int], judging: Sequence[int]) -> Calibration:
    """Return the calibration of a model by its logits for held-out images.

    The temperature is kept if on the judging half the NLL is not higher with it, and the calibration error at most half
    of that without it, or what chance explains; else it is 1. The table of scores is of all images: it compares
    answers with labels, of which the temperature, one number, decides none.

    Args:
        logits: (images, classes), finite, at least two classes.
        labels: (images,), class indices.
        fitting: places of the images that fit the temperature.
        judging: places of the others, which judge it.
    """
    exact = logits.astype(np.float64)
    fit, judge = np.asarray(fitting, dtype=int), np.asarray(judging, dtype=int)
    right = exact.argmax(axis=1) == labels
    found = fit_temperature(exact[fit], labels[fit], prior=_PRIOR) or 1.0

    def errors(temperature: float) -> tuple[float, float, float]:
        confidence, nll = confidence_and_nll(exact[judge] / temperature, labels[judge])
        return nll, calibration_error(reliability_bins(confidence, right[judge])), error_by_chance(confidence)

    before, after = errors(1.0), errors(found)
    if after[0] > before[0] or after[1] > max(before[1] / 2, after[2]):
        found, after = 1.0, before
    confidence, _ = confidence_and_nll(exact / found, labels)
    scores, accepted, wrong = score_rows(confidence, right)
    return Calibration(
        found, len(fit), len(judge), before[0], after[0], before[1], after[1], after[2], len(labels),
        tuple(scores), tuple(accepted), tuple(wrong),
    )  # fmt: skip


def describe(found: Calibration) -> str:
    """Return the temperature and what it does, for people."""
    halves = f"fitted on {found.count} held-out images, judged on {found.judged} others"
    before, after, chance = (100 * e for e in (found.ece_before, found.ece_after, found.ece_by_chance))
    if found.temperature == 1:
        return (
            f"probabilities stay as they are: a temperature ({halves}) neither halved the calibration error nor "
            f"brought it within chance, or raised the NLL; ECE {after:.1f} points"
        )
    return (
        f"probabilities are calibrated with temperature {found.temperature:.3g} ({halves}): ECE {before:.1f} → "
        f"{after:.1f} points (chance: up to {chance:.1f}), NLL {found.nll_before:.3f} → {found.nll_after:.3f}"
    )
