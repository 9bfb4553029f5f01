"""Balanced drawing and class weights, against counts and scikit-learn."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight

from vtk.data.audit.result import Sample
from vtk.data.loading.samplers import BalancedSampler, EpochSampler, balanced_weights

LABELS = [0] * 50 + [1] * 9 + [3] * 2 + [2] * 1


def epoch(sampler: EpochSampler, number: int) -> list[tuple[int, int]]:
    sampler.set_epoch(number)
    return list(sampler)


def test_every_class_comes_equally_often_and_images_before_any_comes_again() -> None:
    sampler = BalancedSampler(LABELS, seed=3)
    for number in range(4):
        drawn = epoch(sampler, number)
        assert len(drawn) == len(sampler) == 62
        per_class = Counter(LABELS[i] for _, i in drawn)
        assert sorted(per_class.values()) == [15, 15, 16, 16]
        for label in range(4):
            times = Counter(i for _, i in drawn if LABELS[i] == label)
            counts = [times[i] for i, own in enumerate(LABELS) if own == label]
            assert max(counts) - min(counts) <= 1
        assert len(set(drawn)) == 62  # an image that comes again has another augmentation seed
        assert {seed % 2**32 for seed, _ in drawn} == {number}


def test_order_and_choice_depend_on_seed_and_epoch_only() -> None:
    a, b, other = (BalancedSampler(LABELS, seed) for seed in (3, 3, 4))
    assert epoch(a, 1) == epoch(b, 1) != epoch(a, 2)
    assert epoch(a, 1) != epoch(other, 1)
    assert epoch(a, 0) == epoch(a, 0)
    shown = {i for number in range(40) for _, i in epoch(a, number)}
    assert shown == set(range(62))  # of a large class every epoch shows other images


def test_weights_are_scikit_learns_and_their_mean_over_images_is_one() -> None:
    samples = [Sample(Path("x"), label) for label in LABELS]
    weights = balanced_weights(samples, 6)
    assert weights[4:] == [0.0, 0.0]  # no images
    expected = compute_class_weight("balanced", classes=np.arange(4), y=LABELS)
    assert weights[:4] == pytest.approx(expected, rel=1e-12)
    assert np.mean([weights[label] for label in LABELS]) == pytest.approx(1)
