"""The choice of the best epoch, and early stopping."""

import json

import numpy as np
import pytest

from vtk.errors import UsageError
from vtk.evaluation.metrics import Metrics
from vtk.training.finetune import finetune, finetune_tasks
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.runs import prepare

# of 15 images, 5 a class: right ones of each class, and the loss. Top-1 is best in epoch 2, macro F1 in epoch 3, the
# loss in epoch 1
EPOCHS = [((2, 2, 2), 0.5), ((5, 5, 0), 0.8), ((3, 3, 3), 0.7), ((4, 3, 1), 0.9), ((1, 1, 1), 0.6)]
BEST = {"auto": 2, "top1": 2, "loss": 1, "macro_f1": 3, "balanced_accuracy": 2, "top5": 1}


def metrics(right, loss, classes):
    confusion = np.diag(right)
    for label, count in enumerate(right):
        confusion[label, (label + 1) % 3] += 5 - count
    top1 = sum(right) / 15
    return Metrics(15, top1, 1.0, loss, confusion, classes)


@pytest.fixture
def config(config):
    """Runs of one block and one step an epoch."""
    small = {"model_kwargs": ("depth=1", "embed_dim=16", "num_heads=2"), "batch_size": 36}
    return lambda **changes: config(**{**small, **changes})


@pytest.fixture
def scripted(monkeypatch):
    """Let evaluations find what `EPOCHS` says, in order."""
    script = []

    def evaluate(model, loader, classes, ranks, *, show_progress, score):
        return metrics(*script.pop(0), classes)

    monkeypatch.setattr(prepare, "evaluate_ranks", evaluate)

    def say(*epochs):
        script[:] = epochs or EPOCHS
        return script

    return say


SLOW = ("top1", "balanced_accuracy", "top5")


@pytest.mark.parametrize("metric", [pytest.param(m, marks=pytest.mark.slow) if m in SLOW else m for m in BEST])
def test_the_best_epoch_is_the_metrics(config, scripted, metric):
    scripted()
    result = finetune(config(epochs=5, metric=metric))
    card = json.loads((result.task / "task.json").read_text())
    assert result.best_epoch == BEST[metric] == card["metrics"]["epoch"]
    right, loss = EPOCHS[result.best_epoch - 1]
    want = metrics(right, loss, ("a", "b", "c"))
    assert {k: card["metrics"][k] for k in want.numbers()} == want.numbers()
    assert result.to_dict()["metric"] == ("top1" if metric == "auto" else metric)
    last = json.loads((result.task_last / "task.json").read_text())["metrics"]
    assert last["macro_f1"] == metrics(*EPOCHS[4], ("a", "b", "c")).macro_f1 and last["epoch"] == 5


def test_of_epochs_with_the_same_metric_the_one_with_the_lowest_loss_is_the_best(config, scripted):
    scripted(((3, 3, 3), 0.7), ((3, 3, 3), 0.5), ((3, 3, 3), 0.9), ((3, 3, 3), 0.5))
    result = finetune(config(epochs=4, metric="top1"))
    assert result.best_epoch == 2  # of the second and the fourth the earlier


@pytest.mark.parametrize(("metric", "patience", "epochs"), [("loss", 2, 3), ("top1", 2, 4), ("top1", 4, 5)])
def test_patience_counts_epochs_without_a_better_one(config, scripted, metric, patience, epochs, capsys):
    scripted()
    result = finetune(config(epochs=5, metric=metric, patience=patience))
    assert len(result.rows) == epochs and result.best_epoch == BEST[metric]
    early = epochs < 5
    assert result.stopped_early == early == ("--patience: no better" in capsys.readouterr().out)


def test_an_early_stop_is_the_same_after_a_resume_and_more_patience_goes_on(config, scripted):
    changes = {"epochs": 5, "metric": "loss"}
    script = scripted()
    finetune(config(**changes, patience=2, stop_after=2))
    result = finetune(config(**changes, patience=2, resume=True))
    assert len(result.rows) == 3 and len(script) == 2 and result.stopped_early
    assert len(finetune(config(**changes, patience=2, resume=True)).rows) == 3  # still enough
    more = finetune(config(**changes, patience=9, resume=True))
    assert len(more.rows) == 5 and more.best_epoch == 1 and not more.stopped_early


def test_a_resumed_run_keeps_its_metric(config, scripted):
    scripted()
    finetune(config(epochs=5, stop_after=1))
    with pytest.raises(UsageError, match=r"--metric loss \(was top1\)"):
        finetune(config(epochs=5, resume=True, metric="loss"))
    state = config().out / "last" / "state.json"
    info = json.loads(state.read_text())
    for name in ("metric", "patience"):  # as a version without them left it
        info["flags"].pop(name, None)
    info["best"] = {k: info["best"][k] for k in ("top1", "top5", "loss", "count", "epoch")}
    state.write_text(json.dumps(info))
    result = finetune(config(epochs=5, resume=True, metric="top1"))
    assert result.best_epoch == 2 and len(result.rows) == 5


def test_several_tasks_go_on_until_all_have_had_enough(config, photos, scripted):
    good, bad = (((5, 5, 5), 0.1), ((1, 1, 1), 0.9))
    scripted(good, bad, bad, good, bad, bad, good, good)  # pets is best in epoch 1, cars in epoch 2
    result = finetune_tasks(config(data=None, tasks=(f"pets={photos}", f"cars={photos}"), epochs=5, patience=2))
    found = {name: (task.best_epoch, len(task.rows)) for name, task in result.tasks.items()}
    assert found == {"pets": (1, 4), "cars": (2, 4)}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"metric": "mAP"},
            r"--metric` mAP is not one of images with one label .*; choose top1, top5, loss, macro_f1, balanced_acc",
        ),
        ({"patience": 0}, "--patience` is 0; allowed is at least 1"),
    ],
)
def test_bad_values_are_refused(values, text):
    with pytest.raises(UsageError, match=text):
        FinetuneConfig(**values)
