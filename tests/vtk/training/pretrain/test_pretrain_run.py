"""Whole runs of `vtk pretrain`: what they leave, stop and resume, and what is made from them."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

from vtk.errors import DataError, UsageError
from vtk.options.files import read_values
from vtk.packs.cards import read_card
from vtk.packs.load import load_checkpoint, load_task
from vtk.runtime.opening import open_source
from vtk.training.engine.callbacks import Callback
from vtk.training.finetune import finetune
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.pretrain.run import pretrain
from vtk.training.pretrain.tokenizer import load_tokenizer

METHODS = ("beit", "mae", "simmim")
KWARGS = {"patch_size": 4, "depth": 2, "embed_dim": 16, "num_heads": 2}


def plain(path, **kwargs):
    """Load a backbone as somebody without this toolkit does."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=16, **KWARGS, **kwargs)
    model.load_state_dict(load_file(path), strict=True)
    return model.eval()


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("method", [pytest.param(m, marks=[pytest.mark.slow] * (m != "beit")) for m in METHODS])
def test_two_epochs_and_two_more_are_four(pretraining, tmp_path, method):
    build = lambda out, **more: pretraining(method=method, out=tmp_path / out, epochs=4, **more)  # noqa: E731
    whole = pretrain(build("whole"))
    pretrain(build("parts", stop_after=2))
    parts = pretrain(build("parts", resume=True))
    assert read_card(whole.backbone) == read_card(parts.backbone)
    for file in ("backbone.safetensors", "last/model.safetensors"):
        a, b = (load_file(tmp_path / name / file) for name in ("whole", "parts"))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    timed = ("seconds", "images_per_second")
    assert [{k: v for k, v in row.items() if k not in timed} for row in parts.rows] == [
        {k: v for k, v in row.items() if k not in timed} for row in whole.rows
    ]
    assert all(row["val_loss"] > 0 for row in parts.rows)


@pytest.mark.parametrize("method", [pytest.param(m, marks=[pytest.mark.slow] * (m != "mae")) for m in METHODS])
def test_a_run_leaves_a_checkpoint_that_timm_and_finetune_start_from(pretraining, photos, tmp_path, method):
    result = pretrain(pretraining(method=method))
    out = result.out
    card = read_card(result.backbone)
    assert card.classes == () and card.model.kwargs == KWARGS and card.input.size == (16, 16)
    assert card.metrics["method"] == method and card.metrics["epoch"] == 2 and card.base is None
    assert {p.name for p in out.iterdir()} == {
        "audit.json", "backbone.safetensors", "config.yaml", "curves.png", "images.csv", "last", "metrics.csv",
        "metrics.jsonl",        "reconstruction.png", *(["tokenizer.safetensors"] if method == "beit" else []),
    }  # fmt: skip
    assert json.loads((out / "audit.json").read_text())["bad"][0]["path"].endswith("broken.jpg")
    for given in (out, result.backbone):
        with pytest.raises(DataError, match="backbone without a classifier"):
            open_source(given)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    model = plain(result.backbone)
    with torch.no_grad():
        assert torch.equal(load_checkpoint(result.backbone).model(images), model(images))
    tuned = finetune(
        FinetuneConfig(
            data=photos, out=tmp_path / "tuned", model="vit_tiny_patch16_224", img_size=16, weights=result.backbone,
            model_kwargs=tuple(f"{k}={v}" for k, v in KWARGS.items()), epochs=1, train="head", workers=0, device="cpu",
        )
    )  # fmt: skip
    state, before = load_task(tuned.task).model.state_dict(), model.state_dict()
    assert all(torch.equal(state[k], before[k]) for k in before)  # all but the new head is what was pre-trained
    fresh = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=16, **KWARGS).state_dict()
    assert not torch.equal(before["blocks.0.attn.qkv.weight"], fresh["blocks.0.attn.qkv.weight"])


@pytest.mark.usefixtures("drawn")
def test_the_tokenizer_is_reused_and_belongs_to_the_run(pretraining, tmp_path):
    first = pretrain(pretraining(method="beit", out=tmp_path / "a"))
    again = pretrain(pretraining(method="beit", out=tmp_path / "b", tokenizer=first.tokenizer, stop_after=1))
    assert load_tokenizer(again.tokenizer)[0].id == load_tokenizer(first.tokenizer)[0].id
    assert again.numbers == first.numbers and first.numbers["tokenizer"]["perplexity"] >= 1
    shutil.copy(first.tokenizer, tmp_path / "copy.safetensors")
    moved = pretraining(method="beit", out=tmp_path / "b", tokenizer=tmp_path / "copy.safetensors", resume=True)
    assert len(pretrain(moved).rows) == 2
    (tmp_path / "b/tokenizer.safetensors").unlink()
    with pytest.raises(DataError, match=r"`--resume`: .*tokenizer\.safetensors; restore the tokenizer of the run"):
        pretrain(pretraining(method="beit", out=tmp_path / "b", resume=True))


def test_the_scheme_of_the_initial_weights_is_told_if_the_method_has_layers_of_it(pretraining, drawn, capsys):
    for method, kinds in (("mae", "mae.linear, mae.mask_token"), ("simmim", "simmim.linear, masked.mask_token")):
        pretrain(pretraining(method=method, max_steps=1, overwrite=True))
        assert f"initial weights of {kinds}: papers (--init)" in capsys.readouterr().out.splitlines()
    small = {"local_crops": 0, "dino_prototypes": 8, "dino_hidden": 8, "dino_bottleneck": 4}
    pretrain(pretraining(method="dino", max_steps=1, overwrite=True, **small))
    told = capsys.readouterr().out
    assert "initial weights" not in told and "weight decay from 0.05 to 0.4" in told


@pytest.mark.usefixtures("drawn")
def test_trackers_have_each_epoch_once_also_after_a_resume(pretraining, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    build = lambda **more: pretraining(out=tmp_path / "run", track=("tensorboard",), **more)  # noqa: E731
    pretrain(build(stop_after=1))
    rows = pretrain(build(resume=True)).rows
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("val/loss")]
    assert found == [(epoch, pytest.approx(row["val_loss"], rel=1e-6)) for epoch, row in enumerate(rows, 1)]
    assert len(found) == 2


@pytest.mark.usefixtures("drawn")
def test_resume_refuses_other_flags_and_leaves_the_run_alone(pretraining, tmp_path):
    config = pretraining(stop_after=1)
    pretrain(config)
    before = {p: p.read_bytes() for p in sorted((tmp_path / "run").rglob("*")) if p.is_file()}
    for change, text in (
        ({"mask_ratio": 0.5}, "--mask-ratio 0.5 (was 0.6)"),
        ({"method": "mae"}, "--method mae (was simmim)"),
        ({"lr": 1e-4}, "--lr 0.0001 (was 0.001)"),
        ({"mask_at": "pixels"}, "--mask-at pixels (was tokens)"),
    ):
        with pytest.raises(UsageError) as error:
            pretrain(dataclasses.replace(config, resume=True, stop_after=None, **change))
        assert text in str(error.value)
    assert {p: p.read_bytes() for p in sorted((tmp_path / "run").rglob("*")) if p.is_file()} == before


@pytest.mark.usefixtures("drawn")
def test_a_run_of_0_1_with_flags_that_are_gone_goes_on(pretraining, tmp_path):
    config = pretraining(stop_after=1)
    pretrain(config)
    state = tmp_path / "run/last/state.json"
    saved = json.loads(state.read_text())
    gone = {"layer_decay": None, "head_lr_mult": 10.0, "dry_run": False, "sam_m": None, "adversarial": None}
    state.write_text(json.dumps({**saved, "flags": {**saved["flags"], **gone}}))
    assert len(pretrain(dataclasses.replace(config, resume=True, stop_after=None)).rows) == 2
    page = tmp_path / "run/config.yaml"
    page.write_text(page.read_text() + "layer_decay: null\nhead_lr_mult: 10.0\nadversarial: null\n")
    assert read_values(page, PretrainConfig, "--config")["method"] == config.method
    page.write_text(page.read_text().replace("head_lr_mult: 10.0", "head_lr_mult: 5.0"))
    with pytest.raises(UsageError, match="unknown key `head_lr_mult`"):
        read_values(page, PretrainConfig, "--config")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_as_one(pretraining, heap, tmp_path, vtk_home, method):
    """torchrun and gloo on the CPU: masks, losses and weights are those of one process up to rounding."""
    config = pretraining(method=method, out=tmp_path / "one", accumulate=2, eval_batch_size=2)
    one = pretrain(config)
    torchrun = shutil.which("torchrun") or str(Path(sys.executable).with_name("torchrun"))
    flags = ["--config", str(tmp_path / "one/config.yaml"), "--out", str(tmp_path / "two")]
    run = [torchrun, "--standalone", "--nproc_per_node", "2", "-m", "vtk", "pretrain", str(heap), *flags]
    done = subprocess.run(
        run, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("held-out loss") == 1  # only one of them talks
    rows = [json.loads(line) for line in (tmp_path / "two/metrics.jsonl").read_text().splitlines()]
    for mine, theirs in zip(one.rows, rows, strict=True):
        for key in ("loss", "val_loss", "lr"):
            assert theirs[key] == pytest.approx(mine[key], rel=1e-4), key
    a, b = (load_file(tmp_path / name / "backbone.safetensors") for name in ("one", "two"))
    assert a.keys() == b.keys()
    assert all(torch.allclose(a[n], b[n], atol=1e-4) for n in a)


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_a_killed_run_goes_on_as_if_it_had_not_been(pretraining, heap, tmp_path, vtk_home):
    config = pretraining(method="beit", out=tmp_path / "whole", epochs=6)
    whole = pretrain(config)
    flags = ["--config", str(tmp_path / "whole/config.yaml"), "--out", str(tmp_path / "killed")]
    process = subprocess.Popen(
        [sys.executable, "-m", "vtk", "pretrain", str(heap), *flags], stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    while not (tmp_path / "killed/last/state.json").exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait()
    resumed = pretrain(dataclasses.replace(config, out=tmp_path / "killed", resume=True))
    assert len(resumed.rows) == 6
    a, b = (load_file(result.backbone) for result in (whole, resumed))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not [p for p in (tmp_path / "killed").iterdir() if "tmp" in p.name]


class Death(Exception):
    """What a run dies of."""


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("method", [pytest.param(m, marks=[pytest.mark.slow] * (m != "mae")) for m in METHODS])
def test_a_run_that_dies_within_an_epoch_goes_on_there(pretraining, tmp_path, method):
    class Dies(Callback):
        def on_step(self, info):
            if (info.epoch, info.step_in_epoch) == (2, 4):
                raise Death

    build = lambda out, **more: pretraining(method=method, out=tmp_path / out, drop_path=0.2, **more)  # noqa: E731
    whole = pretrain(build("whole"))
    with pytest.raises(Death):
        pretrain(build("parts", save_every="3"), callbacks=[Dies()])
    saved = json.loads((tmp_path / "parts/last/state.json").read_text())
    assert (saved["epoch"], saved["step"]) == (1, 2)
    parts = pretrain(build("parts", resume=True))
    for file in ("backbone.safetensors", "last/model.safetensors"):
        a, b = (load_file(tmp_path / name / file) for name in ("whole", "parts"))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    timed = ("seconds", "images_per_second")
    rows = [[{k: v for k, v in row.items() if k not in timed} for row in run.rows] for run in (whole, parts)]
    assert rows[0] == rows[1]
