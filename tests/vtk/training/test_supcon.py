"""Supervised contrastive pre-training: its loss by a double loop in fp64, its views, its runs."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vtk.data.audit.folder_scan import scan
from vtk.data.loading.loader import ImageDataset
from vtk.data.loading.train_pipeline import train_transform
from vtk.errors import UsageError
from vtk.models.inputs import input_spec
from vtk.training.engine.processes import Ranks
from vtk.training.finetune import finetune
from vtk.training.objectives.base import Batch
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.pretrain.run import pretrain
from vtk.training.pretrain.supcon import Contrast, Projected, TwoViews, supcon_loss

TAU = 0.1
SMALL = ("depth=1", "embed_dim=16", "num_heads=2", "patch_size=16")


def by_hand(z, labels):
    """Khosla et al., equation 2, term by term; the mean over anchors that have a positive."""
    total, anchors = 0.0, 0
    for i in range(len(z)):
        others = [a for a in range(len(z)) if a != i]
        positives = [p for p in others if labels[p] == labels[i]]
        if not positives:
            continue
        below = sum(math.exp(float(z[i] @ z[a]) / TAU) for a in others)
        total -= sum(math.log(math.exp(float(z[i] @ z[p]) / TAU) / below) for p in positives) / len(positives)
        anchors += 1
    return total / max(anchors, 1)


def unit(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


@pytest.mark.parametrize(
    "labels",
    [[0, 0, 1, 1, 1, 2, 2], [0, 1, 0, 2, 0, 3], [0, 1, 2, 3], [5, 5]],
    ids=["classes", "some alone", "all alone", "a pair"],
)
def test_the_loss_is_equation_2(labels):
    z, y = unit(len(labels), 6), torch.tensor(labels)
    assert float(supcon_loss(z, y, z, y, 0, TAU)) == pytest.approx(by_hand(z.numpy(), labels), rel=1e-12, abs=1e-15)


def test_the_loss_of_parts_is_that_of_the_whole():
    """As processes share it: each has some of the anchors, all have all of the others."""
    z, y = unit(9, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2])
    parts = [supcon_loss(z[a:b], y[a:b], z, y, a, TAU) * (b - a) / 9 for a, b in ((0, 4), (4, 9))]
    assert float(sum(parts)) == pytest.approx(by_hand(z.numpy(), y.tolist()), rel=1e-12)


def test_gradients_are_those_of_the_formula():
    y = torch.tensor([0, 0, 1, 2, 1, 0])  # the image of class 2 is alone
    raw = unit(6, 3).requires_grad_()

    def loss(x):
        z = torch.nn.functional.normalize(x, dim=1)
        return supcon_loss(z, y, z, y, 0, TAU)

    assert torch.autograd.gradcheck(loss, (raw,))


@pytest.mark.parametrize("labels", [[3], [0, 1, 2]], ids=["one image", "no positives"])
def test_where_nothing_is_to_be_compared_nothing_is_learnt(labels):
    z, y = unit(len(labels), 4).requires_grad_(), torch.tensor(labels)
    loss = supcon_loss(z, y, z, y, 0, TAU)
    loss.backward()
    assert float(loss) == 0 and torch.equal(z.grad, torch.zeros_like(z))


def test_two_views_differ_and_follow_from_the_seed(photos):
    spec = input_spec("vit_tiny_patch16_224", None, 32)
    samples = scan(photos, show_progress=False).train
    draw = [ImageDataset(samples, TwoViews(train_transform(spec)), seed=s) for s in (1, 1, 2)]
    first, again, other = (data[0, 5][0] for data in draw)
    assert first.shape == (2, 3, 32, 32) and not torch.equal(first[0], first[1])
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first, draw[0][1, 5][0])  # nor is another epoch's


def test_all_views_of_a_batch_are_compared():
    torch.manual_seed(0)
    backbone = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
    backbone.num_features = 5
    model = Projected(backbone, 4).double()
    images, labels = torch.randn(3, 2, 3, 2, 2, dtype=torch.float64), torch.tensor([0, 1, 1])
    loss, numbers = Contrast(TAU, Ranks(torch.device("cpu"))).loss(model, Batch(images, labels))
    z = model(images).detach()
    assert torch.allclose(z.norm(dim=2), torch.ones(3, 2, dtype=torch.float64))
    assert float(loss) == pytest.approx(by_hand(z.flatten(0, 1).numpy(), [0, 0, 1, 1, 1, 1]), rel=1e-12)
    assert float(numbers["view_cosine"]) == pytest.approx(float((z[:, 0] * z[:, 1]).sum(1).mean()))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.fixture
def pre(photos, tmp_path):
    def build(**changes):
        values = {
            "data": photos, "out": tmp_path / "pre", "method": "supcon", "model": "vit_tiny_patch16_224",
            "model_kwargs": SMALL, "img_size": 32, "epochs": 2, "batch_size": 8, "optimizer": "lamb", "lr": 5e-3,
            "workers": 0, "device": "cpu",
        }  # fmt: skip
        return PretrainConfig(**{**values, **changes})

    return build


def test_a_run_with_sam_stops_goes_on_and_gives_a_backbone_for_a_linear_head(pre, config, tmp_path):
    whole = pretrain(pre(sam=0.02))
    for i in range(2):
        parts = pretrain(pre(sam=0.02, out=tmp_path / "parts", stop_after=1, resume=i > 0))
    plain = pretrain(pre(out=tmp_path / "plain", epochs=1))
    files = [load_file(run.backbone) for run in (whole, parts)]
    assert files[0].keys() == files[1].keys() and all(torch.equal(files[0][k], files[1][k]) for k in files[0])
    assert not any(k.startswith(("head", "projection")) for k in files[0])
    assert whole.rows[0]["loss"] != plain.rows[0]["loss"] and np.isfinite(whole.val_loss)
    assert whole.rows[1]["loss"] < whole.rows[0]["loss"] < math.log(16)  # of 16 views that are all alike
    assert (tmp_path / "pre" / "similarity.png").stat().st_size > 1000
    run = finetune(config(weights=whole.backbone, pretrained=True, model_kwargs=SMALL, train="head", epochs=1))
    trained = load_file(run.task / "task.safetensors")
    assert {name for name in trained if not torch.equal(trained[name], files[0].get(name, torch.empty(0)))} == {
        "head.weight", "head.bias",
    }  # fmt: skip


def test_held_out_images_of_several_classes_are_compared(pre, monkeypatch):
    seen, loss = [], Contrast.loss

    def watched(self, model, batch):
        if not model.training:
            seen.append(batch.labels.tolist())
        return loss(self, model, batch)

    monkeypatch.setattr(Contrast, "loss", watched)
    pretrain(pre(epochs=2, eval_batch_size=5))
    assert len(seen) == 6 and seen[:3] == seen[3:]  # 15 images, in one order
    assert all(len(set(labels)) > 1 for labels in seen)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"supcon_temperature": 0.0}, "`--supcon-temperature` is 0.0; allowed is above 0"),
        ({"method": "mae", "supcon_dim": 64}, "`--supcon-dim` is for --method supcon; --method is mae"),
        ({"method": "mae", "sam": 0.1}, "`--sam` is for --method supcon"),
        ({"mask_ratio": 0.5}, "`--mask-ratio` is for --method beit, mae and simmim"),
    ],
)
def test_flags_that_do_not_go_together(pre, changes, message):
    with pytest.raises(UsageError, match=message):
        pre(**changes)


@pytest.mark.slow
def test_two_processes_do_what_one_does(pre, photos, tmp_path):
    """36 images in batches of 10: the last batch has 6, and each process sees the images of both."""
    torchrun = shutil.which("torchrun") or str(Path(sys.executable).with_name("torchrun"))
    argv = [
        torchrun, "--standalone", "--nproc_per_node", "2", "-m", "vtk", "pretrain", str(photos), "--method", "supcon",
        "--model", "vit_tiny_patch16_224", "--model-kwargs", ",".join(SMALL), "--img-size", "32", "--epochs", "2",
        "--batch-size", "10", "--optimizer", "lamb", "--lr", "5e-3", "--workers", "0", "--device", "cpu", "--out",
        str(tmp_path / "two"),
    ]  # fmt: skip
    done = subprocess.run(
        argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    one = pretrain(pre(batch_size=10))
    for mine, theirs in zip(one.rows, rows, strict=True):
        for key in ("loss", "val_loss", "view_cosine"):
            assert theirs[key] == pytest.approx(mine[key], rel=1e-4), key
    mine, theirs = (load_file(p / "backbone.safetensors") for p in (one.out, tmp_path / "two"))
    assert all(torch.allclose(mine[name], theirs[name], atol=1e-4) for name in mine)
