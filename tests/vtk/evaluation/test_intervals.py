"""Intervals of proportions and paired differences, against likelihoods maximised by SciPy and enumeration."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import multinomial

from vtk.evaluation.intervals import NORMAL95, paired_difference


def score(lost: int, gained: int, count: int, drop: float) -> float:
    """The score statistic of a drop, from the likelihood of three kinds of images, maximised numerically."""

    def cost(share: float) -> float:
        parts = ((lost, share + drop), (gained, share), (count - lost - gained, 1 - 2 * share - drop))
        return -sum(k * math.log(max(p, 1e-300)) for k, p in parts if k)

    share = minimize_scalar(cost, bounds=(max(0, -drop), (1 - drop) / 2), method="bounded", options={"xatol": 1e-12}).x
    return (lost - gained - count * drop) / math.sqrt(count * (2 * share + drop - drop * drop))


@pytest.mark.parametrize(("lost", "gained", "count"), [(9, 4, 32), (0, 0, 30), (5, 0, 20), (0, 7, 10), (15, 12, 500)])
def test_the_limits_are_where_the_score_statistic_is_that_of_95_per_cent(lost: int, gained: int, count: int) -> None:
    low, high = paired_difference(lost, gained, count)
    assert low < (lost - gained) / count < high
    assert score(lost, gained, count, low) == pytest.approx(NORMAL95, abs=1e-4)
    assert score(lost, gained, count, high) == pytest.approx(-NORMAL95, abs=1e-4)


@pytest.mark.parametrize(("lost", "gained"), [(0.08, 0.04), (0.1, 0.1), (0.3, 0.1)])
def test_the_interval_covers_the_true_drop_in_95_of_100_draws(lost: float, gained: float) -> None:
    count, covered = 25, 0.0
    for i in range(count + 1):
        for j in range(count + 1 - i):
            chance = multinomial.pmf([i, j, count - i - j], count, [lost, gained, 1 - lost - gained])
            if chance > 1e-6:
                low, high = paired_difference(i, j, count)
                covered += chance * (low <= lost - gained <= high)
    assert 0.93 < covered < 0.99


def test_models_that_answer_alike_are_not_known_to_be_alike() -> None:
    wide, narrow = paired_difference(0, 0, 10), paired_difference(0, 0, 1000)
    assert wide[1] == pytest.approx(NORMAL95**2 / (10 + NORMAL95**2), rel=1e-6) == -wide[0]
    assert 0 < narrow[1] < 0.004
    assert np.allclose(paired_difference(10, 0, 10)[1], 1) and paired_difference(10, 0, 10)[0] < 1
