"""The score below which an answer is "unknown"."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from tests.vtk.test_calibration import FITTED
from vtk.calibration import Calibration
from vtk.errors import UsageError
from vtk.evaluation.abstention import choose_threshold, fewest_images, score_rows, upper_bound


def table(confidence: np.ndarray, right: np.ndarray) -> Calibration:
    scores, accepted, errors = (tuple(column) for column in score_rows(confidence, right))
    found = dataclasses.replace(FITTED, scored=len(right), scores=scores, accepted=accepted, errors=errors)
    assert found.fault() is None
    return found


def graded(count: int, wrong: int) -> Calibration:
    """Images of different scores, of which the last ones are wrong."""
    return table(np.linspace(0.99, 0.3, count), np.arange(count) < count - wrong)


@pytest.mark.parametrize("errors", [0, 1, 7, 400])
@pytest.mark.parametrize("count", [114, 401, 50_000])
@pytest.mark.parametrize("delta", [0.1, 0.01])
def test_the_bound_is_clopper_and_pearsons(errors: int, count: int, delta: float) -> None:
    expected = 1.0 if errors >= count else stats.beta.ppf(1 - delta, errors + 1, count - errors)
    assert upper_bound(errors, count, delta) == pytest.approx(expected, rel=1e-9)


def test_two_per_cent_takes_114_images() -> None:
    assert fewest_images(0.02) == 114
    found = choose_threshold(graded(114, 0), 0.02, "x")
    assert found.score == 0 and found.coverage == 1 and found.upper <= 0.02
    with pytest.raises(UsageError, match="takes 114 held-out images at least, and x has the scores of 113"):
        choose_threshold(graded(113, 0), 0.02, "x")


def test_wrong_answers_below_the_threshold_are_not_accepted() -> None:
    found = choose_threshold(graded(400, 100), 0.02, "x")
    scores = np.linspace(0.99, 0.3, 400)
    accepted = scores >= found.score
    assert 0.7 <= accepted.mean() <= 0.76 and found.coverage == accepted.mean()
    assert stats.beta.ppf(0.9, (~(np.arange(400) < 300))[accepted].sum() + 1, 300) <= 0.02


def test_a_risk_that_no_score_keeps_is_refused_with_the_one_that_can_be_kept() -> None:
    right = np.random.default_rng(0).random(400) > 0.2 + 0.3 * (np.arange(400) > 200)
    card = table(np.linspace(0.99, 0.3, 400), right)
    with pytest.raises(UsageError, match="smallest risk with a threshold is") as refused:
        choose_threshold(card, 0.02, "x")
    choose_threshold(card, float(str(refused.value).rsplit(" ", 1)[1]), "x")


def test_a_card_without_scores_is_refused() -> None:
    for card in (None, dataclasses.replace(FITTED, scores=(), accepted=(), errors=())):
        with pytest.raises(UsageError, match="needs the scores of held-out images"):
            choose_threshold(card, 0.02, "x")


def test_images_of_one_score_are_accepted_together() -> None:
    confidence = np.repeat([1.0, 0.9, 0.5], [150, 200, 50])
    scores, accepted, errors = score_rows(confidence, confidence > 0.6)
    assert accepted == [150, 350, 400] and errors == [0, 0, 50]
    assert 0.9 < scores[0] <= 1 and 0.5 < scores[1] <= 0.9 and scores[2] == 0
    # scores that only fp64 tells apart are one in a file's fp32 arithmetic
    assert score_rows(1 - np.arange(400) * 1e-12, confidence > 0.6)[1] == [400]


def test_where_scores_say_nothing_only_accepting_everything_is_tried() -> None:
    right = np.arange(2000) % 80 != 0  # 1.25 % everywhere
    found = choose_threshold(table(np.linspace(0.99, 0.3, 2000), right), 0.02, "x")
    assert found.coverage == 1
    right = np.arange(2000) % 45 != 0  # 2.2 %: a lucky cut must not be taken
    right[:300] = True
    with pytest.raises(UsageError, match="smallest risk"):
        choose_threshold(table(np.random.default_rng(1).permutation(np.linspace(0.99, 0.3, 2000)), right), 0.02, "x")


def simulate(slope: float, count: int, draws: int, seed: int = 0) -> tuple[float, float]:
    """How often the true risk was larger, and the mean share of the coverage that knowing the risk would allow.

    The error at score rank u, from 0 to 1, is slope · u³: the risk of accepting up to t is slope · t³ / 4.
    """
    random, held, best = np.random.default_rng(seed), 0, min(1.0, (4 * 0.02 / slope) ** (1 / 3))
    coverage = []
    for _ in range(draws):
        u = np.sort(random.random(count))
        right = random.random(count) >= slope * u**3
        try:
            found = choose_threshold(table(1 - 0.7 * u, right), 0.02, "x")
        except UsageError:
            coverage.append(0.0)
            continue
        reached = min(1.0, (1 - found.score) / 0.7)
        held += slope * reached**3 / 4 <= 0.02
        coverage.append(reached / best)
    return 1 - (held + coverage.count(0.0)) / draws, float(np.mean(coverage))


def test_the_risk_holds_in_nine_draws_of_ten_with_seven_tenths_of_the_best_coverage() -> None:
    exceeded, share = simulate(0.6, 2000, 60)
    assert exceeded <= 0.1 and share >= 0.7


@pytest.mark.slow
@pytest.mark.parametrize(("slope", "count", "least"), [(0.6, 1000, 0.7), (0.6, 5000, 0.85), (0.3, 2000, 0.75)])
def test_the_risk_holds_in_nine_draws_of_ten_of_other_sizes(slope: float, count: int, least: float) -> None:
    exceeded, share = simulate(slope, count, 400)
    assert exceeded <= 0.1 and share >= least
