"""Calibration against bins made by hand and the formulas in fp64."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.vtk.analysis._models import images, tiny_vit
from vtk.analysis.diagnostics.base import Run
from vtk.analysis.diagnostics.calibration import DIAGNOSTIC
from vtk.analysis.measures.calibration import model_calibration, of_logits
from vtk.errors import DataError, UsageError


def two_classes(confidences, right):
    """Logits whose largest probability is given, for class 0, with labels by whether that is right."""
    p = np.array(confidences)
    return np.stack([np.log(p), np.log1p(-p)], axis=1), np.where(right, 0, 1)


def draws(count, sharpen, seed=0, classes=4):
    """Logits and labels that follow their softmax; what is returned is ``sharpen`` times as large."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(count, classes)) * 1.5
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = np.array([generator.choice(classes, p=row) for row in p])
    return logits * sharpen, labels


def by_hand(logits, labels, bins):
    """ECE from its formula, image by image, edges belonging to the bin below."""
    p = torch.from_numpy(logits).softmax(-1)
    confidence, predicted = p.max(-1)
    total = 0.0
    for low, high in zip(torch.linspace(0, 1, bins + 1)[:-1], torch.linspace(0, 1, bins + 1)[1:], strict=True):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            accuracy = (predicted[inside] == torch.from_numpy(labels)[inside]).double().mean()
            total += float(inside.double().mean() * (accuracy - confidence[inside].mean()).abs())
    return total


def test_bins_made_by_hand():
    found = of_logits(*two_classes([0.55, 0.58, 0.75, 0.95, 0.97, 0.99], [1, 0, 1, 1, 1, 0]), bins=10)
    filled = [row for row in found.bins if row.count]
    assert [(row.low, row.high, row.count) for row in filled] == [(0.5, 0.6, 2), (0.7, 0.8, 1), (0.9, 1.0, 3)]
    assert [row.confidence for row in filled] == pytest.approx([0.565, 0.75, 0.97])
    assert [row.accuracy for row in filled] == pytest.approx([0.5, 1.0, 2 / 3])
    assert found.ece == pytest.approx(2 / 6 * 0.065 + 1 / 6 * 0.25 + 3 / 6 * (0.97 - 2 / 3))
    assert (found.accuracy, found.confidence) == pytest.approx((4 / 6, (0.565 * 2 + 0.75 + 0.97 * 3) / 6))
    assert [row.confidence for row in found.bins if not row.count] == [None] * 7


def test_an_edge_belongs_to_the_bin_below_it_and_certainty_to_the_last():
    found = of_logits(np.array([[0.0, 0.0], [0.0, -800.0]]), np.array([0, 0]), bins=2)
    assert [row.count for row in found.bins] == [1, 1]


@pytest.mark.parametrize("bins", [1, 7, 15])
@pytest.mark.parametrize("sharpen", [0.4, 1.0, 3.0])
def test_ece_is_the_formulas(bins, sharpen):
    logits, labels = draws(400, sharpen)
    assert of_logits(logits, labels, bins=bins).ece == pytest.approx(by_hand(logits, labels, bins), abs=1e-6)


def test_nll_is_torchs_in_fp64_also_where_exp_would_overflow():
    logits, labels = draws(200, 300.0)
    expected = nn.functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels)).item()
    assert of_logits(logits, labels).nll == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("sharpen", [0.5, 2.0])
def test_temperature_is_where_the_gradient_of_the_nll_is_zero_and_undoes_sharpening(sharpen):
    logits, labels = draws(4000, sharpen)
    found = of_logits(logits, labels)
    beta = torch.tensor(1 / found.temperature, dtype=torch.float64, requires_grad=True)
    nll = nn.functional.cross_entropy(torch.from_numpy(logits) * beta, torch.from_numpy(labels))
    assert abs(torch.autograd.grad(nll, beta)[0].item()) < 1e-4
    assert found.temperature == pytest.approx(sharpen, rel=0.1)
    assert found.fitted_nll == pytest.approx(nll.item(), rel=1e-9) and found.fitted_nll < found.nll
    assert found.fitted_ece == pytest.approx(by_hand(logits / found.temperature, labels, 15), abs=1e-9)
    assert found.fitted_ece < found.ece and (found.confidence > found.accuracy) == (sharpen > 1)


def test_no_temperature_where_every_image_is_right_and_where_the_model_is_always_wrong():
    logits, _ = draws(50, 1.0)
    for labels in (logits.argmax(1), logits.argmin(1)):
        found = of_logits(logits, labels)
        assert (found.temperature, found.fitted_ece, found.fitted_nll) == (None, None, None)
        assert any("No temperature" in sentence for sentence in DIAGNOSTIC.read(found.to_dict()))


def test_chance_covers_nineteen_of_twenty_perfectly_calibrated_models_and_not_a_sharp_one():
    below = 0
    for seed in range(100):
        found = of_logits(*draws(60, 1.0, seed=seed))
        below += found.ece <= found.ece_by_chance
    assert 0.9 <= below / 100 <= 0.99
    sharp = of_logits(*draws(1000, 3.0))
    assert sharp.ece > 2 * sharp.ece_by_chance


def test_the_models_logits_are_what_is_judged_in_batches_and_the_first_images_only():
    model = tiny_vit().train()
    batches = images(9, sizes=(4, 5))
    found = model_calibration(model, batches, max_images=7, seed=3)
    x, y = torch.cat([x for x, _ in batches])[:7], torch.cat([y for _, y in batches])[:7]
    assert model.training and found == model_calibration(model, batches, max_images=7, seed=3)
    with torch.no_grad():
        logits = model.eval()(x)
    assert found.images == 7 and found.nll == pytest.approx(nn.functional.cross_entropy(logits, y).item(), rel=1e-12)
    assert found.accuracy == pytest.approx((logits.argmax(-1) == y).double().mean().item())


@pytest.mark.parametrize(
    "change, options, error, message",
    [
        (lambda x, y: (x, y), {"bins": 0}, UsageError, "`bins` is 0"),
        (lambda x, y: (x, nn.functional.one_hot(y, 3)), {}, UsageError, r"one label per image; these labels are"),
        (lambda x, y: (x, y + 1), {}, DataError, "labels reach from 1 to 3; the model has 3 classes"),
        (lambda x, y: (x * math.nan, y), {}, DataError, "not all finite"),
        (lambda x, y: (x[:0], y[:0]), {}, DataError, "no images"),
    ],
    ids=["bins", "soft", "classes", "nan", "none"],
)
def test_what_cannot_be_judged_is_refused(change, options, error, message):
    x, _ = images(3)[0]
    with pytest.raises(error, match=message):
        model_calibration(tiny_vit(), [change(x, torch.tensor([0, 1, 2]))], **options)


def test_a_model_of_one_output_is_refused():
    with pytest.raises(UsageError, match=r"needs logits \(B, classes\)"):
        model_calibration(tiny_vit(num_classes=1), images(2))


@pytest.mark.parametrize(
    "sharpen, expected",
    [(4.0, "over-confident by"), (0.2, "under-confident by"), (1.0, "no evidence of miscalibration")],
    ids=["over", "under", "calibrated"],
)
def test_readings_say_what_the_numbers_say(sharpen, expected):
    told = " ".join(DIAGNOSTIC.read(of_logits(*draws(2000, sharpen)).to_dict()))
    assert expected in told
    assert ("over-confident by" in told) + ("under-confident by" in told) + ("no evidence" in told) == 1


def test_a_model_that_is_under_confident_on_average_is_not_called_calibrated_in_the_next_sentence():
    found = {**of_logits(*draws(64, 1.0)).to_dict(), "images": 64, "accuracy": 0.9375, "confidence": 0.8136}
    told = " ".join(DIAGNOSTIC.read({**found, "ece": 0.1324, "ece_by_chance": 0.153}))
    assert "under-confident by 12.4 points" in told and "this error alone would be no evidence." in told
    assert "no evidence of miscalibration" not in told


def test_the_diagram_has_a_bar_for_each_filled_bin_of_each_model():
    one = of_logits(*two_classes([0.55, 0.75, 0.95, 0.97], [1, 0, 1, 1]), bins=10).to_dict()
    (picture,) = DIAGNOSTIC.draw([Run("a", one), Run("b", one)])
    top, bottom = picture.figure.axes
    assert [bar.get_height() for bar in top.patches] == pytest.approx([100, 0, 100] * 2)
    assert [bar.get_height() for bar in bottom.patches] == [1, 1, 2] * 2
    assert [bar.get_x() for bar in top.patches] == pytest.approx([50, 70, 90, 55, 75, 95])
