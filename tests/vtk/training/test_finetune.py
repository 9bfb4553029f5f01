"""Whole runs on a tiny folder: what they write, that they repeat, resume, and tell the truth about themselves."""

import base64
import csv
import dataclasses
import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file, save_file

from vtk.commands import finetune as command
from vtk.data.audit.folder_scan import scan
from vtk.data.decoding.images import MAX_PIXELS
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.loading.loader import make_loader
from vtk.errors import DataError, UnavailableError, UsageError
from vtk.packs.load import load_task
from vtk.training.engine.fitting import DivergedError
from vtk.training.finetune import finetune
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.runs.outputs import FILES

PACK = {"task.json", "task.safetensors", "base_tensors.json"}


def measure(path, root, *, dtype=torch.float32, batch=64):
    """Top-1 and mean loss of a pack by a loop of its own."""
    task = load_task(path)
    audit = scan(root, classes=task.card.classes, show_progress=False)
    loader = make_loader(audit.val, eval_transform(task.card.input), batch_size=batch, shuffle=False, seed=0, workers=0)
    right, losses, model = 0, [], task.model.to(dtype)
    with torch.no_grad():
        for images, labels in loader:
            logits = model(images.to(dtype)).float()
            right += int((logits.argmax(1) == labels).sum())
            log_p = torch.log_softmax(logits.double(), dim=1)
            losses += (-log_p[torch.arange(len(labels)), labels]).tolist()
    return right / len(losses), sum(losses) / len(losses)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_run_writes_its_files_and_its_pack_gives_its_metric(config, photos, plots, precision, dtype):
    result = finetune(config(precision=precision, epochs=3))
    assert {p.name for p in result.out.iterdir()} == {*FILES, "task", "task-last", "last"}
    assert {p.name for p in result.task.iterdir()} == {p.name for p in result.task_last.iterdir()} == PACK
    card = json.loads((result.task / "task.json").read_text())
    top1, loss = measure(result.task, photos, dtype=dtype)
    assert card["metrics"]["top1"] == result.metrics.top1 == top1
    assert card["metrics"]["loss"] == pytest.approx(loss, abs=1e-12)
    assert card["metrics"]["epoch"] == result.best_epoch
    assert card["regime"] == {"precision": precision, "batch_size": 64, "device": "cpu"}
    images = card["data"].pop("images")
    assert card["data"] == {
        "layout": "split", "val_split": 0.2, "seed": 0, "init": "papers", "root": photos.name, "max_pixels": MAX_PIXELS,
    }  # fmt: skip
    for part, told in images.items():  # twelve bytes an image: of its content, and of its path
        names = sorted(p.relative_to(photos).as_posix() for p in (photos / part).rglob("*.*"))
        texts = [(hashlib.sha256((photos / name).read_bytes()), hashlib.sha256(name.encode())) for name in names]
        wanted = {content.digest()[:6] + path.digest()[:6] for content, path in texts}
        raw = base64.b64decode(told)
        assert {raw[i : i + 12] for i in range(0, len(raw), 12)} == wanted, part
    assert card["classes"] == ["blue", "green", "red"]
    last = json.loads((result.task_last / "task.json").read_text())["metrics"]
    assert last["epoch"] == 3 and last["top1"] == result.rows[-1]["val_top1"]
    assert measure(result.task_last, photos, dtype=dtype)[0] == last["top1"]
    assert result.metrics.top1 >= 0.6  # the classes differ in colour
    rows = list(csv.DictReader((result.out / "metrics.csv").open()))
    lines = [json.loads(line) for line in (result.out / "metrics.jsonl").read_text().splitlines()]
    told = [r["val_top1"] for r in result.rows]
    assert told == [r["val_top1"] for r in lines] == [float(r["val_top1"]) for r in rows]
    assert max(told) == result.metrics.top1
    for name in ("curves.png", "confusion.png"):
        assert (result.out / name).read_bytes().startswith(b"\x89PNG")
    per_class = list(csv.DictReader((result.out / "per_class.csv").open()))
    assert [r["class"] for r in per_class] == card["classes"] and sum(int(r["count"]) for r in per_class) == 15


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_eval_of_a_pack_of_a_flat_folder_gives_the_runs_metric(config, photos, tmp_path, capsys, precision):
    from vtk.commands import eval as eval_command

    shutil.copytree(photos / "train", tmp_path / "flat")
    result = finetune(config(data=tmp_path / "flat", precision=precision, val_split=0.4, seed=5, eval_batch_size=4))
    assert result.metrics.count == 15 and result.metrics.loss > 1e-3
    capsys.readouterr()
    assert eval_command.main([str(result.task), str(tmp_path / "flat"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["top1"], told["loss"], told["count"]) == (result.metrics.top1, result.metrics.loss, 15)


def test_frozen_tensors_are_the_bases_and_only_what_is_trained_is_packed(config):
    result = finetune(config())
    task = load_task(result.task)
    packed = load_file(result.task / "task.safetensors")
    state = task.model.state_dict()
    names = set(json.loads((result.out / "census.json").read_text())["names"])
    assert packed.keys() == names
    assert all(".attn." in n or n.startswith("head.") or n == "pos_embed" for n in names)
    for name in state.keys() - names:
        assert torch.equal(state[name], task.base.tensors[name].float()), name
    moved = [n for n in names if n in task.base.tensors and not torch.equal(packed[n], task.base.tensors[n].float())]
    assert len(moved) == len(names)


def test_what_a_killed_run_left_half_written_is_cleared_away(config):
    first = finetune(config(epochs=1))
    dead = 2**22 - 3  # above what a system gives
    for name in ("last", "task"):
        shutil.copytree(first.out / name, first.out / f"{name}.tmp-{dead}")
    for name in (f"metrics.csv.tmp-{dead}", f"metrics.csv.tmp-{os.getpid()}", f"mine.tmp-{dead}"):
        (first.out / name).write_text("")
    finetune(config(epochs=1, resume=True))
    left = sorted(p.name for p in first.out.glob("*.tmp-*"))
    assert left == sorted([f"metrics.csv.tmp-{os.getpid()}", f"mine.tmp-{dead}"])


def test_same_seed_same_bytes_whatever_the_workers(config, tmp_path):
    changes = {"mixup": 0.8, "cutmix": 1.0, "drop_path": 0.2, "auto_augment": "rand-m5", "reprob": 0.2}
    packs = []
    for name, workers in (("a", 0), ("b", 2)):
        packs.append(finetune(config(out=tmp_path / name, workers=workers, **changes)).task_last)
    for file in ("task.safetensors", "task.json"):
        assert (packs[0] / file).read_bytes() == (packs[1] / file).read_bytes()
    other = finetune(config(out=tmp_path / "c", seed=1, **changes)).task_last
    assert (packs[0] / "task.safetensors").read_bytes() != (other / "task.safetensors").read_bytes()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_and_two_epochs_equal_four(config, tmp_path, precision):
    changes = {"epochs": 4, "precision": precision, "drop_path": 0.2, "mixup": 0.8, "accumulate": 2}
    whole = finetune(config(out=tmp_path / "whole", **changes))
    first = finetune(config(out=tmp_path / "parts", stop_after=2, **changes))
    assert len(first.rows) == 2
    second = finetune(config(out=tmp_path / "parts", resume=True, **changes))
    for folder in ("task", "task-last"):
        for file in PACK:
            name = f"{folder}/{file}"
            assert (whole.out / name).read_bytes() == (second.out / name).read_bytes(), name
    drop = ("seconds", "images_per_second")
    rows = [[{k: v for k, v in r.items() if k not in drop} for r in x.rows] for x in (whole, second)]
    assert rows[0] == rows[1] and len(rows[0]) == 4
    assert (whole.metrics.confusion == second.metrics.confusion).all()
    again = finetune(config(out=tmp_path / "parts", resume=True, **changes))  # nothing is left to train
    assert again.rows == second.rows and again.metrics.top1 == second.metrics.top1


def test_resume_with_other_flags_or_images_is_refused_by_name(config, photos, tmp_path):
    finetune(config(epochs=4, stop_after=1))
    with pytest.raises(UsageError, match=r"--lr 0.5 \(was 0.002\), --mixup 0.3 \(was 0.0\)"):
        finetune(config(epochs=4, resume=True, lr=0.5, mixup=0.3))
    with pytest.raises(UsageError, match=r"--seed 3"):
        finetune(config(epochs=4, resume=True, seed=3))
    state = tmp_path / "run" / "last" / "state.json"
    info = json.loads(state.read_text())
    state.write_text(json.dumps({**info, "data": "0" * 64}))
    with pytest.raises(DataError, match="the images or their labels are not those"):
        finetune(config(epochs=4, resume=True))
    state.write_text(json.dumps({**info, "base": "0" * 64}))
    with pytest.raises(DataError, match="started from base 000000000000"):
        finetune(config(epochs=4, resume=True))
    state.write_text(json.dumps({**info, "schema": 99}))
    with pytest.raises(DataError, match="newer vtk"):
        finetune(config(epochs=4, resume=True))
    (tmp_path / "run" / "last" / "state.pt").write_bytes(b"not a state")
    state.write_text(json.dumps(info))
    with pytest.raises(DataError, match="damaged"):
        finetune(config(epochs=4, resume=True))
    with pytest.raises(DataError, match="no state of a run"):
        finetune(config(out=tmp_path / "empty", resume=True))


def test_resume_falls_back_to_the_old_folder(config, tmp_path):
    changes = {"epochs": 3, "out": tmp_path / "run"}
    finetune(config(stop_after=1, **changes))
    (tmp_path / "run" / "last").rename(tmp_path / "run" / "last.old")
    assert len(finetune(config(resume=True, **changes)).rows) == 3


def test_saved_config_repeats_the_run(config, photos, tmp_path, capsys):
    first = finetune(config(crop_scale=(0.5, 0.9), precision="bf16"))
    text = (first.out / "config.yaml").read_text()
    assert yaml.safe_load(text)["crop_scale"] == [0.5, 0.9]
    argv = [str(photos), "--config", str(first.out / "config.yaml"), "--out", str(tmp_path / "again"), "--json"]
    assert command.main(argv) == 0
    printed = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    for name in ("task.safetensors", "task.json"):
        assert (first.task / name).read_bytes() == (tmp_path / "again" / "task" / name).read_bytes()
    assert printed["top1"] == first.metrics.top1 and printed["task"] == str(tmp_path / "again" / "task")


def test_the_cards_command_is_the_one_that_made_it(config, photos, tmp_path):
    first = finetune(config())
    words = json.loads((first.task / "task.json").read_text())["command"].split()
    assert words[:3] == ["vtk", "finetune", str(photos)] and "--no-pretrained" in words
    assert command.main([*words[2:], "--out", str(tmp_path / "again"), "--workers", "0"]) == 0
    assert (first.task / "task.safetensors").read_bytes() == (tmp_path / "again/task/task.safetensors").read_bytes()


def test_output_folder_rules(config, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="not empty"):
        finetune(config(epochs=1))
    finetune(config(epochs=1, overwrite=True))
    (out / "task-last" / "extra.bin").write_text("mine")
    with pytest.raises(DataError, match=r"task-last holds extra\.bin, which no run wrote"):
        finetune(config(epochs=1, overwrite=True))
    assert (out / "task" / "task.json").is_file()
    (out / "task-last" / "extra.bin").unlink()
    result = finetune(config(epochs=1, overwrite=True, train="head"))
    assert (out / "notes.txt").read_text() == "mine"
    assert set(load_file(result.task / "task.safetensors")) == {"head.weight", "head.bias", "pos_embed"}


def test_a_diverging_run_stops_and_keeps_its_best_pack(config, photos, tmp_path, monkeypatch):
    from vtk.training.objectives import base as objective

    real = objective.Classification.loss
    seen = []

    def explode(self, model, batch):
        seen.append(1)
        loss, logs = real(self, model, batch)
        return (loss * float("nan") if len(seen) > 7 else loss), logs  # 5 steps an epoch

    monkeypatch.setattr(objective.Classification, "loss", explode)
    monkeypatch.setattr("vtk.training.engine.stepper.PATIENCE", 3)
    with pytest.raises(DivergedError, match=r"epoch 2 .*the best pack, of epoch 1, is kept in .*task") as info:
        finetune(config(epochs=3))
    assert "\n" not in str(info.value)
    assert (tmp_path / "run" / "per_class.csv").is_file() and (tmp_path / "run" / "curves.png").is_file()
    task = tmp_path / "run" / "task"
    assert measure(task, photos)[0] == json.loads((task / "task.json").read_text())["metrics"]["top1"]
    assert json.loads((tmp_path / "run" / "last" / "state.json").read_text())["epoch"] == 1


def test_bf16_packs_record_what_is_stored(config, photos):
    result = finetune(config(pack_dtype="bf16", epochs=2))
    for path in (result.task, result.task_last):
        tensors = load_file(path / "task.safetensors")
        assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
        top1, loss = measure(path, photos)
        metrics = json.loads((path / "task.json").read_text())["metrics"]
        assert metrics["top1"] == top1 and metrics["loss"] == pytest.approx(loss, abs=1e-12)
    assert result.metrics.top1 == json.loads((result.task / "task.json").read_text())["metrics"]["top1"]


def test_other_trainings(config, tmp_path):
    weights = tmp_path / "base.safetensors"
    save_file(timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=32, num_heads=2).state_dict(), weights)
    wide = {"img_size": (32, 48), "weights": weights, "pretrained": True}
    for i, changes in enumerate(
        (
            {"optimizer": "sgd", "lr": 0.05, "train": "full", "grad_checkpointing": True},
            {"train": "ffn", "smoothing": 0.0, "clip_grad": 0.0},
            {**wide, "train": "attn+norm", "resize_mode": "squash", "mean": (0.1, 0.2, 0.3)},
        )
    ):
        result = finetune(config(out=tmp_path / str(i), epochs=1, **changes))
        assert result.census.policy == changes["train"]
    card = json.loads((result.task / "task.json").read_text())
    assert (card["input"]["height"], card["input"]["width"]) == (32, 48)
    assert card["input"]["resize_mode"] == "squash" and card["input"]["mean"] == [0.1, 0.2, 0.3]


def test_refusals_before_any_image_is_read(config, tmp_path, monkeypatch):
    monkeypatch.setattr("vtk.training.runs.task.read_data", lambda *a, **k: pytest.fail("data was read"))
    with pytest.raises(UsageError, match="30 is not a multiple of the patch"):
        finetune(config(img_size=30))
    with pytest.raises(UsageError, match="no data"):
        finetune(config(data=None))
    with pytest.raises(UsageError, match="--device` is tpu"):
        finetune(config(device="tpu"))
    if not torch.cuda.is_available():
        with pytest.raises(UnavailableError, match="0 CUDA devices"):
            finetune(config(device="cuda"))
    assert not (tmp_path / "run").exists()


def test_a_model_without_attention_is_refused(config):
    with pytest.raises(UsageError, match="has no attention weights"):
        finetune(config(model="test_resnet", model_kwargs=()))


def test_default_output_folder_is_named_after_the_data(config, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = finetune(dataclasses.replace(config(epochs=1), out=None))
    assert result.task.resolve() == tmp_path / "runs" / photos.name / "task"


def test_config_is_accepted_from_python():
    assert FinetuneConfig(data="x").epochs == 5


@pytest.mark.parametrize("wrong", ["data", "weights", "augment", "model"])
def test_overwrite_with_something_wrong_leaves_the_earlier_run(config, tmp_path, wrong):
    result = finetune(config())
    before = {p: p.read_bytes() for p in result.out.rglob("*") if p.is_file()}
    (tmp_path / "bad" / "a").mkdir(parents=True)
    changes = {
        "data": {"data": tmp_path / "bad"},
        "weights": {"weights": tmp_path / "none.safetensors"},
        "augment": {"auto_augment": "nonsense"},
        "model": {"model": "resnet18", "model_kwargs": (), "weights": None, "pretrained": False},
    }[wrong]
    with pytest.raises((DataError, UsageError)):
        finetune(config(overwrite=True, **changes))
    assert {p: p.read_bytes() for p in result.out.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": "x"},
        {"epoch": 99},
        {"rows": 3},
        {"rows": []},
        {"best": []},
        {"flags": []},
        {"base": 3},
        {"processes": None},
    ],
    ids=str,
)
def test_an_edited_state_is_a_data_error(config, tmp_path, change):
    finetune(config(epochs=4, stop_after=1))
    state = tmp_path / "run" / "last" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | change))
    with pytest.raises(DataError, match="--overwrite in place of --resume"):
        finetune(config(epochs=4, resume=True))


def test_a_state_with_more_than_tensors_is_refused_without_bad_advice(config, tmp_path):
    finetune(config(epochs=4, stop_after=1))
    (tmp_path / "run" / "last" / "state.pt").write_bytes(pickle.dumps({"optimizer": Path}))
    with pytest.raises(DataError, match=r"state.pt is damaged or holds more than tensors") as caught:
        finetune(config(epochs=4, resume=True))
    assert "weights_only" not in str(caught.value)
