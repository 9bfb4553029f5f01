import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    classification_report,
    confusion_matrix,
    f1_score,
    log_loss,
    top_k_accuracy_score,
)

from vtk.errors import DataError, UsageError
from vtk.evaluation import evaluate
from vtk.evaluation.metrics import Metrics

CLASSES = tuple(f"class {i}" for i in range(8))


def batches(logits: torch.Tensor, labels: torch.Tensor, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(logits.split(size), labels.split(size), strict=True))


@pytest.fixture
def scores() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(203, 8, generator=generator), torch.randint(0, 7, (203,), generator=generator)  # no class 7


def run(logits: torch.Tensor, labels: torch.Tensor, size: int = 32) -> Metrics:
    return evaluate(lambda x: x, batches(logits, labels, size), CLASSES, show_progress=False)


def test_against_scikit_learn(scores: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, labels = scores
    metrics = run(logits, labels)
    truth, guess = labels.numpy(), logits.argmax(1).numpy()
    assert metrics.count == 203
    assert metrics.top1 == pytest.approx(accuracy_score(truth, guess), abs=1e-12)
    assert metrics.top5 == pytest.approx(top_k_accuracy_score(truth, logits.numpy(), k=5, labels=range(8)), abs=1e-12)
    assert metrics.loss == pytest.approx(log_loss(truth, logits.double().softmax(1).numpy(), labels=range(8)), rel=1e-9)
    assert np.array_equal(metrics.confusion, confusion_matrix(truth, guess, labels=range(8)))
    assert metrics.confusion.dtype == np.int64
    assert metrics.balanced_accuracy == pytest.approx(balanced_accuracy_score(truth, guess), abs=1e-12)
    assert metrics.macro_f1 == pytest.approx(f1_score(truth, guess, labels=range(7), average="macro"), abs=1e-12)
    report = classification_report(
        truth, guess, labels=range(8), target_names=CLASSES, output_dict=True, zero_division=np.nan
    )
    for row in metrics.per_class():
        expected = report[row.name]
        assert row.count == expected["support"]
        values = [expected[key] for key in ("precision", "recall", "f1-score")]
        np.testing.assert_allclose([row.precision, row.recall, row.f1], values)


def test_any_batch_size_gives_the_same(scores: tuple[torch.Tensor, torch.Tensor]) -> None:
    one, other = (run(*scores, size).to_dict() for size in (1, 203))
    assert one == other


def test_half_precision_logits_and_ties() -> None:
    logits = torch.zeros(8, 8, dtype=torch.bfloat16)
    metrics = run(logits, torch.arange(8))
    assert metrics.top1 == 1 / 8 and metrics.top5 >= 5 / 8
    assert metrics.loss == pytest.approx(math.log(8))


def test_two_classes_have_no_top5() -> None:
    metrics = evaluate(lambda x: x, [(torch.eye(2), torch.tensor([1, 1]))], ("a", "b"), show_progress=False)
    assert (metrics.top1, metrics.top5) == (0.5, 1.0)
    assert metrics.mixed_up() == [("b", "a", 1)]


def test_no_gradient_is_kept(scores: tuple[torch.Tensor, torch.Tensor]) -> None:
    layer = torch.nn.Linear(8, 8)
    seen = []

    def predict(x: torch.Tensor) -> torch.Tensor:
        seen.append(layer(x).requires_grad)
        return layer(x)

    evaluate(predict, batches(*scores, 100), CLASSES, show_progress=False)
    assert seen == [False] * 3 and torch.is_grad_enabled()


def test_dict_is_json_and_print_is_short(
    scores: tuple[torch.Tensor, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = run(*scores)
    value = json.loads(json.dumps(metrics.to_dict(), allow_nan=False))
    assert value["per_class"][7]["recall"] is None and sum(map(sum, value["confusion"])) == 203
    metrics.print()
    assert f"top-1 {100 * metrics.top1:.1f} %" in capsys.readouterr().out
    n = 100
    wide = Metrics(n, 1.0, 1.0, 0.0, np.eye(n, dtype=np.int64), tuple(f"c{i}" for i in range(n)))
    wide.print()
    out = capsys.readouterr().out
    assert "24 of 100" in out and len(out.splitlines()) < 32


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match="no images to evaluate"):
        evaluate(lambda x: x, [], CLASSES, show_progress=False)
    with pytest.raises(UsageError, match=r"gives \(2, 5\) for 2 images of 8 classes"):
        run(torch.zeros(2, 5), torch.zeros(2, dtype=torch.long))
    with pytest.raises(UsageError, match="labels reach 8"):
        run(torch.zeros(2, 8), torch.tensor([0, 8]))
