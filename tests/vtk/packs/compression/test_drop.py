"""Drops of a metric: measured with their intervals, and expected from probabilities."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, balanced_accuracy_score
from torch import Tensor

from vtk.packs.compression.answers import Answers
from vtk.packs.compression.drop import DropMetric, compare, mean_precision, value_of
from vtk.packs.compression.expected import expected_value, probabilities

CLASSES = ("a", "b", "c", "d")


def draw(count: int, seed: int, *, sharp: float = 1.0) -> Answers:
    """A model that is calibrated at temperature ``1 / sharp``: labels follow the softmax of its logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(count, 4, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return Answers(sharp * logits, labels, CLASSES)


def disturbed(answers: Answers, amount: float, seed: int = 9) -> Answers:
    noise = torch.randn(answers.logits.shape, generator=torch.Generator().manual_seed(seed))
    return Answers(answers.logits + amount * noise, answers.labels, answers.classes)


def several(answers: Answers) -> Answers:
    """The same logits with several labels an image."""
    generator = torch.Generator().manual_seed(1)
    return Answers(answers.logits, torch.bernoulli(answers.logits.sigmoid(), generator=generator), answers.classes)


@pytest.mark.parametrize("metric", ["top1", "balanced_accuracy", "mAP"])
def test_the_expected_drop_is_the_drop_on_many_images(metric: DropMetric) -> None:
    many = draw(50_000, 0)
    many = several(many) if metric == "mAP" else many
    true = value_of(many, metric) - value_of(disturbed(many, 0.5), metric)
    few = many.of(range(400))
    truth = probabilities(few)
    expected = expected_value(few, truth, metric) - expected_value(disturbed(few, 0.5), truth, metric)
    assert true > 0.01 and expected == pytest.approx(true, rel=0.35)


def test_probabilities_are_calibrated_by_a_temperature() -> None:
    for sharp in (0.5, 3.0):
        found, exact = probabilities(draw(4000, 1, sharp=sharp)), draw(4000, 1).logits.double().softmax(1)
        assert float((found - exact).abs().max()) < 0.06
    alone = probabilities(draw(1, 1, sharp=20.0))  # one image says little: no extreme temperature
    assert 0.4 < float(alone.max()) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["top1", "balanced_accuracy", "mAP"])
def test_intervals_cover_the_drop_of_the_population(metric: DropMetric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vtk.packs.compression.drop._RESAMPLES", 100)
    many = draw(20_000, 2)
    many = several(many) if metric == "mAP" else many
    after = disturbed(many, 0.7)
    true = value_of(many, metric) - value_of(after, metric)
    covered = []
    for i in range(30):
        places = range(i * 90, (i + 1) * 90)
        found = compare(many.of(places), after.of(places), metric)
        covered.append(found.low <= true <= found.high)
    assert sum(covered) >= 26  # of 30, of which 28.5 are expected


def test_numbers_of_a_comparison_are_those_of_scikit_learn() -> None:
    before = draw(50, 3)
    after = disturbed(before, 1.0)
    found = compare(before, after, "balanced_accuracy")
    for answers, value in ((before, found.before), (after, found.after)):
        assert value == pytest.approx(balanced_accuracy_score(answers.labels, answers.logits.argmax(1)))
    assert found.agreement == pytest.approx(float((before.logits.argmax(1) == after.logits.argmax(1)).double().mean()))
    many = several(before)
    same = compare(many, many, "mAP")
    assert (same.drop, same.agreement) == (0, 1) and (same.low, same.high) == (-3 / 50, 3 / 50)


def test_a_class_without_images_is_absent_and_counts_in_no_mean() -> None:
    before = draw(60, 4)
    kept = (before.labels != 2).nonzero().flatten().tolist()
    some = before.of(kept)
    found = compare(some, disturbed(some, 0.5), "balanced_accuracy")
    assert found.absent == ("c",) and math.isfinite(found.low) and found.low < found.high
    truth = probabilities(some)
    assert math.isfinite(expected_value(some, truth, "balanced_accuracy"))


def test_weighted_average_precision_is_that_of_scikit_learn_with_ties() -> None:
    random = np.random.default_rng(0)
    scores, truth = np.round(random.normal(size=(40, 5)), 1), random.random((40, 5)) < 0.3
    weights = random.multinomial(40, np.full(40, 1 / 40), size=3).astype(float)
    for mine, weight in zip(mean_precision(scores, truth, weights), weights, strict=True):
        each = [average_precision_score(truth[:, i], scores[:, i], sample_weight=weight) for i in range(5)]
        assert mine == pytest.approx(np.mean(each))


def test_agreement_of_several_labels_counts_images_with_all_alike() -> None:
    logits = torch.tensor([[1.0, -1, 1, 1], [1, 1, 1, 1], [-1, -1, -1, -1]])
    labels: Tensor = torch.ones(3, 4)
    other = logits.clone()
    other[0, 0] = -1
    found = compare(Answers(logits, labels, CLASSES), Answers(other, labels, CLASSES), "mAP")
    assert found.agreement == pytest.approx(2 / 3)
