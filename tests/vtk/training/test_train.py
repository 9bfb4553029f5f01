"""`vtk train`: checkpoints that need no flags, the same after a stop, and the options that fine-tuning lacks."""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests._plots import not_drawn
from tests.vtk._faults import training_killed_at, tree
from tests.vtk.training.test_resume import same_runs
from vtk.__main__ import main
from vtk.errors import DataError, UsageError
from vtk.models.task_parameters import head_names
from vtk.options import option_of
from vtk.packs.load import load_checkpoint
from vtk.training.engine.processes import Ranks
from vtk.training.finetune import finetune
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.runs import outputs
from vtk.training.runs.history import History
from vtk.training.runs.plan import plan_run
from vtk.training.runs.scratch import set_dropout
from vtk.training.runs.task import build_task
from vtk.training.train import train, train_memory
from vtk.training.train_config import TrainConfig

SMALL = {"model": "vit_tiny_patch16_224", "model_kwargs": ("depth=2", "embed_dim=32", "num_heads=2"), "img_size": 32}
RUN = {"epochs": 2, "batch_size": 12, "lr": 2e-3, "workers": 0, "device": "cpu", "crop_scale": (0.6, 1.0)}


@pytest.fixture(scope="module")
def result(photos, tmp_path_factory):
    """A run of two epochs with what a scratch run has more of; its checkpoint is of a changed architecture."""
    changes = {"cb": True, "mean": (0.4,), "std": (0.3,), "ema": 0.9, "drop": 0.1, "mixup": 0.5, "loss": "bce"}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("confusion_png", "curves_png"):  # a picture takes longer than the run
            patch.setattr(f"vtk.evaluation.result_files.{name}", lambda data, path: path.write_bytes(not_drawn()))
        return train(TrainConfig(data=photos, out=tmp_path_factory.mktemp("train") / "run", **SMALL, **RUN, **changes))


@pytest.fixture
def scratch(photos, tmp_path):
    def build(**changes):
        return TrainConfig(**{"data": photos, "out": tmp_path / "run", **SMALL, **RUN, **changes})

    return build


def run_json(argv, capsys):
    code = main([*map(str, argv), "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


def test_a_run_leaves_checkpoints_and_no_pack(result):
    assert {path.name for path in result.out.iterdir()} == {
        "model.safetensors", "model-last.safetensors", "last", "config.yaml", "metrics.csv", "metrics.jsonl",
        "curves.png", "confusion.png", "per_class.csv", "audit.json", "census.json", "images.csv",
    }  # fmt: skip
    told = result.to_dict()
    assert told["model"] == str(result.out / "model.safetensors") and told["top1"] == result.top1
    assert not {"task", "task_last", "memory"} & told.keys()
    task = load_checkpoint(result.model)
    assert task.card.base is None and task.card.regime.precision == "fp32" and task.card.command.startswith("vtk train")
    assert task.card.init == "papers"
    assert json.loads((result.out / "census.json").read_text())["trained"] == sum(
        p.numel() for p in task.model.parameters()
    )


@pytest.mark.parametrize("which", ["model.safetensors", "model-last.safetensors", "."])
def test_eval_gives_the_metric_of_the_run_exactly(result, photos, which, capsys):
    found = run_json(["eval", result.out / which, photos, "--workers", 0], capsys)
    epoch = len(result.run.rows) if "last" in which else result.run.best_epoch
    row = result.run.rows[epoch - 1]
    assert (found["top1"], found["loss"]) == (row["val_top1"], row["val_loss"])


def test_each_checkpoint_tells_of_its_own_epoch(scratch, monkeypatch):
    judge = History.judge
    monkeypatch.setattr(History, "judge", lambda self, epoch, found: epoch == 1 and judge(self, epoch, found))
    result = train(scratch())
    for path, row in zip((result.model, result.model_last), result.run.rows, strict=True):
        card = load_checkpoint(path).card
        assert (card.metrics["epoch"], card.metrics["loss"]) == (row["epoch"], row["val_loss"])
    assert not torch.equal(*(load_file(path)["head.weight"] for path in (result.model, result.model_last)))


def test_finetune_and_train_go_on_from_a_checkpoint_without_further_flags(result, photos, tmp_path):
    further = {"data": photos, "weights": result.model, "epochs": 1, "batch_size": 12, "lr": 1e-9, "head_lr_mult": 1.0,
               "workers": 0, "device": "cpu"}  # fmt: skip
    start = {**load_file(result.model)}
    pack = finetune(FinetuneConfig(out=tmp_path / "pack", **further))
    on = train(TrainConfig(out=tmp_path / "on", **further))
    card = load_checkpoint(result.model).card
    for path in (pack.task / "task.safetensors", on.model):
        for name, tensor in load_file(path).items():
            torch.testing.assert_close(tensor, start[name], rtol=0, atol=1e-6)  # at that rate nothing moves
    assert load_checkpoint(on.model).card.input == card.input
    assert load_checkpoint(on.model).card.transforms == card.transforms and card.transforms[0].op
    assert on.top1 == pytest.approx(result.top1) and pack.top1 == pytest.approx(result.top1)


def test_a_plain_checkpoint_loads_strictly_into_timm(scratch):
    result = train(scratch(epochs=1))
    model = timm.create_model(
        "vit_tiny_patch16_224", depth=2, embed_dim=32, num_heads=2, img_size=32, num_classes=3
    ).eval()
    model.load_state_dict(load_file(result.model), strict=True)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model(images), load_checkpoint(result.model).model(images), rtol=0, atol=0)


FULL = {"mixup": 0.4, "loss": "bce", "bce_threshold": 0.0, "smoothing": 0.0, "aug_repeats": 2, "drop": 0.1,
        "reprob": 0.3, "remode": "pixel", "crop_pad": 2, "ema": 0.9, "optimizer": "lamb", "schedule": "linear",
        "lr_batch": 24, "attn_drop": 0.1}  # fmt: skip


def test_one_epoch_and_another_equal_two(scratch, tmp_path):
    whole = train(scratch(out=tmp_path / "whole", **FULL))
    for i in range(2):
        parts = train(scratch(out=tmp_path / "parts", stop_after=1, resume=i > 0, **FULL))
    same_runs(tmp_path / "whole", tmp_path / "parts")
    for name in ("model.safetensors", "model-last.safetensors"):
        one, two = (load_file(tmp_path / run / name) for run in ("whole", "parts"))
        assert all(torch.equal(one[key], two[key]) for key in one.keys() | two.keys())
    assert (whole.run.metrics.loss, whole.run.best_epoch) == (parts.run.metrics.loss, parts.run.best_epoch)


def test_a_resume_with_other_flags_is_refused(scratch, config, tmp_path):
    train(scratch(epochs=2, stop_after=1))
    before = tree(tmp_path / "run")
    with pytest.raises(UsageError, match=r"--lr 0\.5 \(was 0\.002\)"):
        train(scratch(resume=True, lr=0.5))
    with pytest.raises(UsageError, match="a run of `vtk train`, not of `vtk finetune`"):
        finetune(config(resume=True))
    (tmp_path / "run" / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"model\.safetensors, the best so far, is gone"):
        train(scratch(resume=True))
    assert {k: v for k, v in before.items() if k != "model.safetensors"} == tree(tmp_path / "run")


def test_overwrite_takes_only_what_a_run_wrote(scratch, tmp_path):
    out = tmp_path / "run"
    train(scratch(epochs=1))
    (out / "notes.txt").write_text("mine")
    (out / "model.safetensors.tmp-4194305").write_bytes(b"of a killed run")
    # as if it had been of `vtk pretrain`
    shutil.copyfile(out / "model.safetensors", out / outputs.BACKBONE)
    save_file({}, out / outputs.TOKENIZER, metadata={"vtk_tokenizer": "{}"})
    (out / outputs.RECONSTRUCTION).write_bytes(not_drawn())
    again = train(scratch(epochs=1, seed=1, overwrite=True))
    assert (out / "notes.txt").read_text() == "mine" and not (out / "model.safetensors.tmp-4194305").exists()
    assert load_checkpoint(again.model).card.data["seed"] == 1
    assert not {path.name for path in out.iterdir()} & {outputs.BACKBONE, outputs.TOKENIZER, outputs.RECONSTRUCTION}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"weights": "a.pth", "pretrained": True}, "--weights.*--pretrained"),
        ({"bce_threshold": 0.2}, "--bce-threshold` needs --loss bce"),
        ({"loss": "bce", "multi_label": True}, "--loss` bce: --multi-label"),
        ({"loss": "bce", "class_weights": "balanced"}, "--class-weights` balanced.*--sampler balanced"),
        ({"loss": "mse"}, "--loss` is mse; allowed is ce, bce or bce-sum"),
        ({"aug_repeats": 0}, "--aug-repeats` is 0; allowed is at least 1"),
        ({"aug_repeats": 2, "sampler": "balanced"}, "--aug-repeats` and `--sampler`"),
        ({"drop": 1.0}, "--drop` is 1.0"),
        ({"lr_batch": 0}, "--lr-batch` is 0"),
        ({"crop_pad": -1}, "--crop-pad` is -1"),
        ({"remode": "noise"}, "--remode` is noise"),
        ({"schedule": "step"}, "--schedule` is step; allowed is cosine, linear or exponential"),
        ({"lr": float("nan")}, "--lr"),
    ],
)
def test_bad_values_are_refused_in_one_line(values, text):
    with pytest.raises(UsageError, match=text) as info:
        TrainConfig(**values)
    assert "\n" not in str(info.value)


def test_every_option_has_help():
    assert all(option_of(TrainConfig, f.name).help for f in dataclasses.fields(TrainConfig))


def test_the_rate_is_that_of_the_batch(scratch, capsys):
    result = train(scratch(epochs=1, lr=1e-3, lr_batch=24, batch_size=12, accumulate=3, warmup=0.0, min_lr=1.0))
    assert result.run.rows[0]["lr"] == pytest.approx(1e-3 * 12 * 3 / 24)
    assert "learning rate up to 0.0015" in capsys.readouterr().out
    config = (result.out / "config.yaml").read_text()
    assert "lr: 0.001\n" in config and "lr_batch: 24\n" in config  # another --batch-size scales it again


def test_dropout_is_in_timms_places_and_of_training_only(tiny):
    model = tiny()
    set_dropout(model, drop=0.25, attn_drop=0.5)
    wanted = tiny(pos_drop_rate=0.25, proj_drop_rate=0.25, attn_drop_rate=0.5)
    rates = [{n: m.p for n, m in each.named_modules() if isinstance(m, torch.nn.Dropout)} for each in (model, wanted)]
    assert rates[0] == rates[1] and 0.25 in rates[0].values()
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model.eval()(images), tiny().eval()(images), rtol=0, atol=0)
    torch.manual_seed(1)
    found = model.train()(images)
    torch.manual_seed(1)
    torch.testing.assert_close(found, wanted.train()(images), rtol=0, atol=0)
    with pytest.raises(UsageError, match=r"--attn-drop` 0\.1: ResNet has no such dropout"):
        set_dropout(timm.create_model("test_resnet"), drop=0.0, attn_drop=0.1)


def test_the_classifier_starts_where_it_is_told(scratch):
    config = scratch(epochs=1, lr=1e-12, loss="bce-sum", head_bias=-4.0)
    result = train(config)
    model = load_checkpoint(result.model).model
    (bias,) = (p for n, p in model.named_parameters() if n in head_names(model) and n.endswith("bias"))
    np.testing.assert_allclose(bias.detach().numpy(), -4.0, atol=1e-6)


def test_a_trained_classifier_keeps_its_biases(result, photos, tmp_path):
    config = TrainConfig(data=photos, weights=result.model, out=tmp_path / "on", head_bias=-4.0, **RUN)
    task = build_task(plan_run(config, tmp_path / "on", Ranks(torch.device("cpu"))))
    assert torch.equal(task.model.head.bias, load_file(result.model)["head.bias"])


def test_rows_of_a_trained_classifier_keep_their_biases(result, photos, tmp_path):
    two = shutil.copytree(photos, tmp_path / "two")
    for part in ("train", "val"):
        shutil.rmtree(two / part / "green")
    config = TrainConfig(data=two, weights=result.model, out=tmp_path / "on", head_bias=-4.0, **RUN)
    task = build_task(plan_run(config, tmp_path / "on", Ranks(torch.device("cpu"))))
    assert torch.equal(task.model.head.bias, load_file(result.model)["head.bias"][[0, 2]])


def test_a_dry_run_writes_nothing_and_auto_finds_a_batch(scratch, tmp_path):
    report = train_memory(scratch(dry_run=True, batch_size="auto"))
    assert report.mode == "plain" and report.batch > 1 and not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="trains nothing"):
        train(scratch(dry_run=True))
    with pytest.raises(UsageError, match="no data"):
        train(scratch(data=None))


def test_several_labels_an_image(photos, tmp_path, capsys):
    lines = [f"{path},{path.parent.name}{';warm' if path.parent.name == 'red' else ''}"
             for path in sorted((photos / "train").rglob("*.png"))]  # fmt: skip
    table = tmp_path / "labels.csv"
    table.write_text("path,labels\n" + "\n".join(lines) + "\n")
    argv = ["train", table, "--multi-label", "--out", tmp_path / "run", "--model", SMALL["model"], "--model-kwargs",
            *SMALL["model_kwargs"], "--img-size", 32, "--epochs", 1, "--batch-size", 12, "--workers", 0]  # fmt: skip
    found = run_json(argv, capsys)
    assert found["metric"] == "mAP" and found["epochs"] == 1
    with safe_open(found["model"], framework="pt") as file:
        assert json.loads(file.metadata()["vtk"])["multi_label"] is True
    judged = run_json(["eval", found["model"], table, "--workers", 0], capsys)
    assert judged["mAP"] == found["mAP"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs signals of Linux")
def test_killed_at_any_file_operation_a_run_goes_on_to_the_same_checkpoints(scratch, tmp_path):
    whole = train(scratch(out=tmp_path / "whole"))
    for number in range(1, 200, 7):
        out = tmp_path / f"killed-{number}"
        if not training_killed_at(number, functools.partial(train, scratch(out=out)), out):
            break
        if (out / "last").is_dir():
            train(scratch(out=out, resume=True))
        else:
            train(scratch(out=out, overwrite=True))
        for name in ("model.safetensors", "model-last.safetensors"):
            one, two = (load_file(folder / name) for folder in (whole.out, out))
            assert all(torch.equal(one[key], two[key]) for key in one.keys() | two.keys()), number
        assert not list(out.glob("*.tmp-*"))
    assert number > 14


@pytest.mark.slow
def test_two_processes_train_the_same_as_one(scratch, photos, tmp_path):
    """Images, order and augmentation of a step are those of one process; sums over them are in another order."""
    flags = [
        str(photos), "--recipe", "deit", "--model", SMALL["model"], "--model-kwargs", *SMALL["model_kwargs"],
        "--img-size", "32", "--epochs", "2", "--batch-size", "12", "--mixup", "0", "--cutmix", "0", "--drop-path", "0",
        "--workers", "0", "--device", "cpu", "--json",
    ]  # fmt: skip
    told = []
    for world in (1, 2):
        out = tmp_path / f"of-{world}"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
        done = subprocess.run(
            [*command, "-m", "vtk", "train", *flags, "--out", str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        row = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        told.append((row, load_file(out / "model-last.safetensors")))
    (row, one), (other, two) = told
    assert row["loss"] == pytest.approx(other["loss"], rel=1e-4)
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-3, atol=1e-4)
