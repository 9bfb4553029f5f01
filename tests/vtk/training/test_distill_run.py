"""Runs with a teacher: what they log, keep and resume, and that several processes do what one does."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.vtk._faults import tree
from vtk.card import Card
from vtk.errors import UsageError
from vtk.models.create import build_model
from vtk.packs.load import card_metadata, load_task
from vtk.training.finetune import finetune
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.objectives.distillation import Trained
from vtk.training.train_config import TrainConfig

CLASSES = ("blue", "green", "red")
SMALL = {"depth": 1, "embed_dim": 32, "num_heads": 2}


def write_teacher(path, seed=7, size=32, **kwargs):
    created = build_model(
        "vit_tiny_patch16_224", num_classes=3, img_size=size, pretrained=False, kwargs={**SMALL, **kwargs}
    )
    torch.manual_seed(seed)
    state = {k: v + 0.2 * torch.randn_like(v) for k, v in created.model.state_dict().items()}
    save_file(state, path, metadata=card_metadata(Card(created.spec, created.input, CLASSES)))
    return path


@pytest.fixture
def teacher(tmp_path):
    (tmp_path / "teacher").mkdir()
    return write_teacher(tmp_path / "teacher" / "model.safetensors", size=48)


def test_a_run_with_a_teacher(config, teacher, tmp_path, capsys):
    """It logs both losses, the pack is the student's alone, and it resumes with the teacher wherever that is now."""
    taught = {"distill_from": str(teacher.parent), "distill_alpha": 0.9, "mixup": 0.4, "ema": 0.9}
    whole = finetune(config(out=tmp_path / "whole", **taught))
    said = capsys.readouterr().out
    assert f"teacher {teacher.parent} (vit_tiny_patch16_224, id" in said and "soft, alpha 0.9, temperature 1" in said
    assert "images are resampled for it, from 32×32 to 48×48 px" in said
    for row in whole.rows:
        both = 0.1 * row["loss_labels"] + 0.9 * row["loss_teacher"]
        assert row["loss"] == pytest.approx(both, rel=1e-4) and 0 <= row["agreement"] <= 1
    assert whole.rows[1]["loss_teacher"] < whole.rows[0]["loss_teacher"]
    plain = finetune(config(out=tmp_path / "plain"))
    assert whole.census == plain.census
    files = [load_file(run.task / "task.safetensors") for run in (whole, plain)]
    assert files[0].keys() == files[1].keys() and not torch.equal(files[0]["head.weight"], files[1]["head.weight"])
    assert f"--distill-from {teacher.parent} --distill-alpha 0.9" in load_task(whole.task).card.command

    finetune(config(out=tmp_path / "parts", stop_after=1, **taught))
    moved = tmp_path / "moved.safetensors"
    shutil.move(teacher, moved)
    finetune(config(out=tmp_path / "parts", resume=True, **{**taught, "distill_from": str(moved)}))
    ends = [tree(tmp_path / name / "task-last")["task.safetensors"] for name in ("whole", "parts")]
    assert ends[0] == ends[1]
    other = write_teacher(tmp_path / "other.safetensors", seed=8)
    here = {**taught, "distill_from": str(moved)}
    for change in ({"distill_from": str(other)}, {"distill_alpha": 0.8}, {"distill_from": None, "distill_alpha": 0.5}):
        with pytest.raises(UsageError, match=r"`--resume` continues with the run's own flags.*--distill-"):
            finetune(config(out=tmp_path / "parts", resume=True, **{**here, **change}))


@pytest.mark.parametrize("kind", ["features", "tokens"])
def test_a_teacher_that_cannot_teach_leaves_the_run_before_alone(config, tmp_path, kind):
    """What ``--overwrite`` replaces stays until nothing can be refused any more."""
    wide = write_teacher(tmp_path / "wide.safetensors", embed_dim=48, num_heads=3)
    out = tmp_path / "run"
    finetune(config(out=out, epochs=1))
    before = tree(out)
    with pytest.raises(UsageError, match=f"`--distill-kind` {kind}: the student has"):
        finetune(config(out=out, epochs=1, overwrite=True, distill_from=str(wide), distill_kind=kind))
    assert tree(out) == before
    with pytest.raises(UsageError, match="the student has"):
        finetune(config(out=tmp_path / "new", distill_from=str(wide), distill_kind=kind))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["features", "tokens"])
def test_features_alone_train_no_new_classifier(config, photos, teacher, tmp_path, kind):
    """They are below it: a pack of it would guess. One that starts from trained weights or a pack is left as it is."""
    write_teacher(teacher)
    alone = {"distill_from": str(teacher), "distill_kind": kind, "distill_alpha": 1.0, "epochs": 1}
    with pytest.raises(UsageError, match=f"--distill-kind {kind} gives the new classifier nothing to learn"):
        finetune(config(out=tmp_path / "new", **alone))
    with pytest.raises(UsageError, match=f"--distill-kind` {kind} compares what is below the classifier"):
        finetune(config(out=tmp_path / "new", train="head", **{**alone, "distill_alpha": 0.5}))
    assert not (tmp_path / "new").exists()
    if kind == "tokens":
        return
    small = tuple(f"{key}={value}" for key, value in SMALL.items())
    trained = {"weights": teacher, "pretrained": True, "model_kwargs": small}
    run = finetune(config(out=tmp_path / "trained", **trained, **alone))
    state = load_file(run.task_last / "task.safetensors")
    two = shutil.copytree(photos, tmp_path / "two")  # rows of two of the classes
    shutil.rmtree(two / "train" / "green")
    shutil.rmtree(two / "val" / "green")
    finetune(config(out=tmp_path / "rows", **{"data": two, **trained, **alone}))
    assert torch.allclose(state["head.weight"], load_file(teacher)["head.weight"], atol=1e-3)
    pack = finetune(config(out=tmp_path / "pack", epochs=1)).task
    finetune(config(out=tmp_path / "on", init_from=(str(pack),), **alone))


def test_a_teacher_at_hand_needs_no_file(config, teacher, tmp_path):
    model = load_file(teacher)
    created = build_model("vit_tiny_patch16_224", num_classes=3, img_size=48, pretrained=False, kwargs=SMALL)
    created.model.load_state_dict(model)
    trained = Trained(created.model, Card(created.spec, created.input, CLASSES), "at hand")
    runs = [
        finetune(config(out=tmp_path / "file", epochs=1, distill_from=str(teacher))),
        finetune(config(out=tmp_path / "hand", epochs=1, distill_from="at hand"), teacher=trained),
    ]
    assert runs[0].rows[0]["loss_teacher"] == runs[1].rows[0]["loss_teacher"]


def test_what_was_not_asked_for_changes_nothing(config, photos):
    for kind in (FinetuneConfig, TrainConfig):
        assert kind(data=photos).distill_from is None
    before = finetune(config(epochs=2, stop_after=1))
    state = json.loads((before.out / "last" / "state.json").read_text())
    flags = {k: v for k, v in state["flags"].items() if not k.startswith("distill_")}
    (before.out / "last" / "state.json").write_text(json.dumps({**state, "flags": flags}))  # of an older version
    assert len(finetune(config(epochs=2, resume=True)).rows) == 2


@pytest.mark.parametrize("kind", ["soft", "tokens"])
def test_in_16_bits_the_teacher_is_rounded_too(config, teacher, tmp_path, kind):
    write_teacher(teacher)
    runs = [
        finetune(config(out=tmp_path / p, precision=p, epochs=1, distill_from=str(teacher), distill_kind=kind))
        for p in ("fp32", "bf16")
    ]
    first, second = (run.rows[0]["loss_teacher"] for run in runs)
    assert first != second and second == pytest.approx(first, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["soft", "features"])
def test_two_processes_do_what_one_does(config, photos, tmp_path, kind):
    teacher = write_teacher(tmp_path / "teacher.safetensors")
    torchrun = shutil.which("torchrun") or str(Path(sys.executable).with_name("torchrun"))
    argv = [
        torchrun, "--standalone", "--nproc_per_node", "2", "-m", "vtk", "finetune", str(photos), "--model",
        "vit_tiny_patch16_224", "--model-kwargs", "depth=2,embed_dim=32,num_heads=2", "--no-pretrained", "--img-size",
        "32", "--epochs", "2", "--batch-size", "8", "--lr", "2e-3", "--head-lr-mult", "1", "--workers", "0", "--device",
        "cpu", "--distill-from", str(teacher), "--distill-alpha", "0.9", "--distill-kind", kind, "--out",
        str(tmp_path / "two"),
    ]  # fmt: skip
    done = subprocess.run(
        argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    run = finetune(config(out=tmp_path / "one", distill_from=str(teacher), distill_alpha=0.9, distill_kind=kind))
    rows = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    for mine, theirs in zip(run.rows, rows, strict=True):
        for key in ("loss", "loss_teacher", "loss_labels", "val_loss"):
            assert theirs[key] == pytest.approx(mine[key], rel=1e-3), key
