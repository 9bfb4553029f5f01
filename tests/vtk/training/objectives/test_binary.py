"""Binary cross-entropy of mixed images, against timm's loss and a formula in fp64."""

import numpy as np
import pytest
import torch
from timm.loss import BinaryCrossEntropy

from vtk.errors import UsageError
from vtk.training.engine.param_groups import lr_factor
from vtk.training.objectives.base import Batch
from vtk.training.objectives.binary import Binary


def batch(seed=0, images=6, classes=5):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(images, classes, generator=random) * 3
    labels = torch.randint(classes, (images,), generator=random)
    return logits, Batch(torch.randn(images, 3, 8, 8, generator=random), labels)


@pytest.mark.parametrize("smoothing, threshold", [(0.0, None), (0.1, None), (0.0, 0.0), (0.0, 0.2), (0.1, 0.2)])
@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_equals_timms(smoothing, threshold, total, mixed):
    logits, hard = batch()
    ours = Binary(5, smoothing=smoothing, threshold=threshold, total=total, mixup=0.8 if mixed else 0.0, cutmix=1.0)
    ours.start_epoch(3)
    prepared = ours.prepare(hard) if mixed else hard
    assert prepared.labels.ndim == (2 if mixed else 1)
    theirs = BinaryCrossEntropy(smoothing, target_threshold=threshold, sum_classes=total)
    torch.testing.assert_close(ours.criterion(logits, prepared), theirs(logits, prepared.labels))


def test_both_classes_of_a_mixed_image_are_present():
    """DeiT's code: a target above 0 is 1; the loss is the mean over images and classes."""
    logits, _ = batch()
    soft = torch.zeros(6, 5)
    soft[:, 0], soft[:, 3] = 0.9, 0.1
    found = Binary(5, threshold=0.0).criterion(logits, Batch(torch.empty(6, 0), soft))
    z = logits.double().numpy()
    target = np.zeros((6, 5))
    target[:, [0, 3]] = 1
    wanted = np.mean(np.log1p(np.exp(-z)) * target + np.log1p(np.exp(z)) * (1 - target))
    assert float(found) == pytest.approx(wanted, rel=1e-6)
    found = Binary(5, total=True).criterion(logits, Batch(torch.empty(6, 0), soft))
    target[:, 0], target[:, 3] = 0.9, 0.1
    assert float(found) == pytest.approx(
        np.sum(np.log1p(np.exp(-z)) * target + np.log1p(np.exp(z)) * (1 - target)) / 6, rel=1e-6
    )


def test_half_precision_logits_are_widened():
    logits, hard = batch()
    found = Binary(5).criterion(logits.bfloat16(), hard)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, Binary(5).criterion(logits.bfloat16().float(), hard), rtol=0, atol=0)


@pytest.mark.parametrize("smoothing, threshold", [(0.1, 0.0), (0.5, 0.05), (0.3, 0.95)])
def test_a_threshold_that_tells_nothing_apart_is_refused(smoothing, threshold):
    with pytest.raises(UsageError, match="which it does not tell apart"):
        Binary(5, smoothing=smoothing, threshold=threshold)


def test_a_linear_schedule_is_a_line():
    factors = [lr_factor(step, 110, 10 / 110, 0.1, "linear") for step in range(111)]
    np.testing.assert_allclose(factors[:10], np.arange(1, 11) / 10)
    np.testing.assert_allclose(factors[10:], np.linspace(1, 0.1, 101))
