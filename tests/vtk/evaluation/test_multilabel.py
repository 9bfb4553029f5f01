"""Numbers of several labels an image, against scikit-learn."""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, log_loss, precision_recall_fscore_support

from vtk.errors import DataError, UsageError
from vtk.evaluation.multilabel import evaluate_labels
from vtk.evaluation.result_files import per_class_csv

CLASSES = tuple("abcdef")


def some():
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(101, 6, generator=generator) < 0.3).float()
    labels[:, 5] = 0  # a label without images
    return torch.randn(101, 6, generator=generator) + labels, labels


def run(logits, labels, size=32):
    return evaluate_labels(
        lambda x: x, list(zip(logits.split(size), labels.split(size), strict=True)), CLASSES, show_progress=False
    )


def test_against_scikit_learn():
    logits, labels = some()
    found = run(logits, labels)
    true, score, given = labels.numpy()[:, :5], logits.numpy()[:, :5], (logits > 0).numpy()
    assert found.mAP == pytest.approx(average_precision_score(true, score, average="macro"), abs=1e-12)
    assert found.macro_f1 == pytest.approx(f1_score(true, given[:, :5], average="macro"), abs=1e-12)
    assert found.micro_f1 == pytest.approx(f1_score(labels.numpy(), given, average="micro"), abs=1e-12)
    p = logits.double().sigmoid().numpy()
    losses = [log_loss(labels.numpy()[:, i], p[:, i], labels=[0, 1]) for i in range(6)]
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-9)
    expected = precision_recall_fscore_support(labels.numpy(), given, zero_division=np.nan)
    rows = found.per_class()
    np.testing.assert_allclose([row.precision for row in rows], expected[0])
    np.testing.assert_allclose([row.recall for row in rows], expected[1])
    assert [row.count for row in rows] == expected[3].tolist()
    assert np.isnan(rows[5].average_precision) and found.count == 101


def test_any_batch_size_gives_the_same_and_the_dict_is_json(capsys):
    one, other = (run(*some(), size).to_dict() for size in (1, 101))
    assert one == other == json.loads(json.dumps(one, allow_nan=False))
    assert one["per_class"][5]["average_precision"] is None and one["multi_label"] is True
    found = run(*some())
    found.print()
    assert f"mAP {100 * found.mAP:.1f} %" in capsys.readouterr().out
    lines = per_class_csv(found).splitlines()
    assert lines[0] == "class,count,precision,recall,f1,average_precision" and lines[6].startswith("f,0,0.0,,0.0,")


def test_logits_that_are_no_numbers_rank_as_zero():
    logits, labels = some()
    logits[3, 0], logits[5, 1], logits[7, 2] = torch.nan, torch.inf, -torch.inf
    found = run(logits, labels)
    plain = logits.clone()
    plain[3, 0], plain[5, 1], plain[7, 2] = 0, 1e3, -1e3
    expected = average_precision_score(labels.numpy()[:, :5], plain.numpy()[:, :5], average=None)
    np.testing.assert_allclose([row.average_precision for row in found.per_class()[:5]], expected)
    assert np.isnan(found.loss) and np.isfinite(found.mAP)


def test_what_does_not_fit_is_refused():
    with pytest.raises(DataError, match="no images to evaluate"):
        evaluate_labels(lambda x: x, [], CLASSES)
    with pytest.raises(DataError, match="no held-out image has a label"):
        run(torch.zeros(2, 6), torch.zeros(2, 6))
    with pytest.raises(UsageError, match=r"gives \(2, 5\) for labels of \(2, 6\); both must be \(2, 6\)"):
        run(torch.zeros(2, 5), torch.zeros(2, 6))
