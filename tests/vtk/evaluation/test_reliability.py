"""The temperature, judged on other images than it was fitted on."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from vtk.evaluation.temperature import calibrate, describe

HALVES = list(range(0, 1000, 2)), list(range(1, 1000, 2))


def draw(heat: float, count: int = 1000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits whose softmax at temperature ``heat`` is the true distribution of the labels, fp32."""
    random = np.random.default_rng(seed)
    true = random.normal(size=(count, 5)) * 2
    shares = np.exp(true) / np.exp(true).sum(1, keepdims=True)
    labels = (random.random((count, 1)) > shares.cumsum(1)).sum(1).clip(0, 4)
    return (heat * true).astype(np.float32), labels


@pytest.mark.parametrize("heat", [0.4, 3.0])
def test_a_temperature_is_that_of_the_drawn_labels(heat: float) -> None:
    logits, labels = draw(heat)
    found = calibrate(logits, labels, *HALVES)
    assert found.temperature == pytest.approx(heat, rel=0.15)
    assert (found.count, found.judged, found.scored) == (500, 500, 1000)
    assert found.nll_after < found.nll_before
    assert found.ece_after <= max(found.ece_before / 2, found.ece_by_chance)


def test_the_likelihood_is_torchs_on_the_judging_half_and_least_on_the_other() -> None:
    logits, labels = draw(3.0)
    found = calibrate(logits, labels, *HALVES)
    exact, truth = torch.from_numpy(logits).double(), torch.from_numpy(labels)
    fit, judge = HALVES
    for temperature, nll in ((1.0, found.nll_before), (found.temperature, found.nll_after)):
        assert float(F.cross_entropy(exact[judge] / temperature, truth[judge])) == pytest.approx(nll, rel=1e-9)
    on_fit = [float(F.cross_entropy(exact[fit] / t, truth[fit])) for t in np.array([0.9, 1.0, 1.1]) * found.temperature]
    assert on_fit[1] == min(on_fit)


def test_labels_of_the_judging_half_do_not_change_what_is_fitted() -> None:
    logits, labels = draw(3.0)
    other = labels.copy()
    other[HALVES[1][:20]] = 0
    assert calibrate(logits, labels, *HALVES).temperature == calibrate(logits, other, *HALVES).temperature


def test_a_temperature_that_the_other_half_contradicts_is_left_out() -> None:
    # one half is over-confident, the other under-confident
    hot, labels = draw(4.0)
    cold, _ = draw(0.4)
    logits = np.where(np.arange(1000)[:, None] % 2 == 0, hot, cold)
    found = calibrate(logits, labels, *HALVES)
    assert found.temperature == 1 and found.nll_after == found.nll_before and found.ece_after == found.ece_before
    assert "stay as they are" in describe(found)


def test_where_every_answer_is_right_the_temperature_stays_finite() -> None:
    labels = np.arange(40) % 2
    found = calibrate(np.eye(2, dtype=np.float32)[labels] * 3, labels, list(range(20)), list(range(20, 40)))
    assert 0.05 < found.temperature <= 1 and found.fault() is None
