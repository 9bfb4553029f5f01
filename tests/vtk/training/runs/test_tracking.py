"""Scalars for TensorBoard, read back by its own reader."""

import json
import subprocess
import sys

import pytest

from vtk.commands import finetune as command
from vtk.errors import UnavailableError, UsageError
from vtk.training.finetune import finetune, finetune_tasks
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.runs.tracking import tag


def scalars(folder):
    """Return {tag: [(step, value)]} of what TensorBoard would show."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in names}


@pytest.fixture
def config(config):
    """Runs of one block and one step an epoch."""
    small = {"model_kwargs": ("depth=1", "embed_dim=16", "num_heads=2"), "batch_size": 36}
    return lambda **changes: config(**{**small, **changes})


def test_tensorboard_reads_what_the_table_says(config):
    result = finetune(config(track=("tensorboard", "csv")))
    found = scalars(result.out / "tensorboard")
    assert found.keys() == {tag(key) for key in result.rows[0] if key != "epoch"} and "val/top1" in found
    for key in result.rows[0]:
        if key != "epoch":
            wanted = [(int(row["epoch"]), pytest.approx(row[key], rel=1e-6)) for row in result.rows]
            assert found[tag(key)] == wanted, key
    assert "--track" not in json.loads((result.task / "task.json").read_text())["command"]


def test_every_epoch_is_there_once_after_a_resume_and_only_the_new_ones_after_overwrite(config):
    finetune(config(epochs=3, stop_after=1, track=("tensorboard",)))
    result = finetune(config(epochs=3, resume=True, track=("tensorboard",)))
    assert [step for step, _ in scalars(result.out / "tensorboard")["val/loss"]] == [1, 2, 3]
    mine = result.out / "tensorboard" / "notes.txt"
    mine.write_text("mine")
    finetune(config(epochs=1, overwrite=True))
    assert [path.name for path in (result.out / "tensorboard").iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_each_task_has_a_folder(config, photos):
    changes = {"data": None, "tasks": (f"a={photos}", f"b={photos}"), "epochs": 1, "track": ("tensorboard",)}
    result = finetune_tasks(config(**changes))
    for name, run in result.tasks.items():
        found = scalars(result.out / name / "tensorboard")
        assert found["val/loss"] == [(1, pytest.approx(run.rows[0]["val_loss"], rel=1e-6))]


def test_without_the_package_one_line_and_no_data_is_read(config, photos, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("vtk.training.runs.task.read_data", lambda *a, **k: pytest.fail("data was read"))
    with pytest.raises(UnavailableError, match="pip install 'vit-toolkit\\[tensorboard\\]'") as caught:
        finetune(config(track=("tensorboard",)))
    assert caught.value.exit_code == 5 and "\n" not in str(caught.value)


@pytest.mark.slow
def test_it_is_imported_only_when_asked_for():
    code = "import sys, vtk.training.runs.run; sys.exit('tensorboard' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_are_checked():
    with pytest.raises(UsageError, match="--track` is comet; allowed is tensorboard, wandb, mlflow or csv"):
        FinetuneConfig(track=("comet",))
    with pytest.raises(UsageError, match="--track` has comet"):
        command.main(["x", "--track", "csv,comet"])
