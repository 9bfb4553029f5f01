"""Whole runs of `vtk pretrain --method dino`: views, files, stop and resume, precision, processes, what it learns."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.neighbors import KNeighborsClassifier
from torchvision.transforms import RandomSolarize

from vtk.data.audit.folder_scan import scan
from vtk.data.digits import write_digits
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.loading.loader import ImageDataset
from vtk.data.mirroring import Mirroring
from vtk.errors import DataError, UsageError
from vtk.packs.cards import read_card
from vtk.packs.load import load_checkpoint
from vtk.training.engine.callbacks import Callback
from vtk.training.engine.processes import Ranks
from vtk.training.finetune import finetune
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.pretrain.dino.method import Dino
from vtk.training.pretrain.dino.views import Blur, Crops, small_size
from vtk.training.pretrain.method import Setting
from vtk.training.pretrain.prepare import make_plan
from vtk.training.pretrain.run import pretrain
from vtk.training.pretrain.supcon import Projected

KWARGS = ("patch_size=8", "depth=1", "embed_dim=16", "num_heads=2")
CPU = Ranks(torch.device("cpu"))


@pytest.fixture
def dino(photos, tmp_path):
    """Configs of runs of a second: 36 photos of three classes at 32 px, two views of 32 and one of 16 px."""

    def build(**changes):
        values = {
            "data": photos, "out": tmp_path / "run", "method": "dino", "model": "vit_tiny_patch16_224", "epochs": 2,
            "model_kwargs": KWARGS, "img_size": 32, "batch_size": 12, "workers": 0, "device": "cpu", "local_crops": 1,
            "dino_prototypes": 8, "dino_hidden": 16, "dino_bottleneck": 8, "lr": 5e-3,
        }  # fmt: skip
        return PretrainConfig(**{**values, **changes})

    return build


def views_of(config):
    config = config.resolved()
    plan = make_plan(config, CPU)
    return plan, plan.views(plan.spec, Mirroring(0.5, ""))[0]


def test_views_are_packed_in_order_and_follow_from_the_seed(dino, photos):
    plan, views = views_of(dino(local_crops=3, local_size=(8, 16)))
    crops = plan.method.crops
    assert crops == Crops(3, (32, 32), (8, 16), 3) and crops.views == 5
    data = [ImageDataset(scan(photos, show_progress=False).train, views, seed=s) for s in (1, 1, 2)]
    rows = torch.stack([data[0][0, i][0] for i in (4, 5)])
    assert torch.equal(data[1][0, 5][0], rows[1]) and not torch.equal(data[2][0, 5][0], rows[1])
    whole, small = crops.split(rows)
    assert whole.shape == (4, 3, 32, 32) and small.shape == (6, 3, 8, 16)
    for image, row in enumerate(rows):  # image 1 of view 2 is row 2·B + 1
        own = torch.cat([whole[image::2].flatten(), small[image::2].flatten()])
        assert torch.equal(own, row)
    assert len({view.sum().item() for view in (*whole, *small)}) == 10
    assert pickle.loads(pickle.dumps(views)).count == 3


@pytest.mark.parametrize("changed", [True, False])
def test_colours_and_sharpness_change_only_if_they_shall(dino, changed):
    """Of an image of two colours, crops with nearest pixels have no others; a third comes from blur or jitter."""
    plan, views = views_of(dino(interpolation="nearest", dino_colors=changed))
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = (200, 40, 0)
    torch.manual_seed(0)
    rows = torch.stack([views(Image.fromarray(stripes)) for _ in range(20)])
    whole, small = plan.method.crops.split(rows)
    kinds = [len(view.flatten(1).T.unique(dim=0)) for view in (*whole, *small)]
    if not changed:
        assert max(kinds) == 2
        return
    mean, std = (torch.tensor(v)[:, None, None] for v in (plan.spec.mean, plan.spec.std))
    pixels = whole * std + mean
    grey = [bool((view.amax(0) - view.amin(0) < 0.01).all()) for view in pixels]
    assert 2 <= sum(grey) <= 16 and len({view.amax().item() for view in pixels}) > 20  # one in five; jitter


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            {},
            "colours of views are changed by up to 40 %; some views are grey, blurred or solarised (--no-dino-colors)",
        ),
        (
            {"color_jitter": 0.2},
            "colours of views are changed by up to 20 %; some views are grey, blurred or solarised",
        ),
        ({"dino_colors": False}, None),
        ({"in_chans": 4}, "colours and sharpness of views stay: images of 4 channels have no colours"),
    ],
    ids=str,
)
def test_a_run_says_what_becomes_of_colours(dino, flags, line, tmp_path, capsys):
    plan, views = views_of(dino(precision="fp32", **flags))
    changed = any(isinstance(step, Blur) for step in views.whole[0].steps)
    assert changed == (line is not None and "changed by" in line)  # what is done is what is said
    backbone = timm.create_model(
        "vit_tiny_patch16_224", num_classes=0, img_size=32, in_chans=flags.get("in_chans", 3), patch_size=8, depth=1,
        embed_dim=16, num_heads=2,
    )  # fmt: skip
    plan.method.model(backbone, Setting(plan.config, plan.spec, CPU, tmp_path, None, 0))
    told = [text for text in capsys.readouterr().out.splitlines() if text.startswith("colours")]
    assert len(told) == (line is not None) and all(text.startswith(line) for text in told)


def test_views_are_blurred_and_solarised_as_the_authors_do(dino):
    _, views = views_of(dino())
    parts = (*views.whole, views.small)
    blurs = [[step.probability for step in part.steps if isinstance(step, Blur)] for part in parts]
    assert blurs == [[1.0], [0.1], [0.5]]
    solarised = [[step.p for step in part.steps if isinstance(step, RandomSolarize)] for part in parts]
    assert solarised == [[], [0.2], []]
    jitter = views.small.steps[-3].transforms[0]
    assert (jitter.brightness, jitter.saturation, jitter.hue) == ((0.6, 1.4), (0.8, 1.2), (-0.1, 0.1))
    assert views.whole[0].steps[0].scale == (0.4, 1.0) and views.small.steps[0].scale == (0.05, 0.4)


def test_the_blur_is_in_proportion_to_the_view():
    assert Blur(1.0, 224).radii == (0.1, 2.0) and Blur(1.0, 56).radii == (0.025, 0.5)
    image = Image.effect_noise((32, 32), 80).convert("RGB")
    assert Blur(0.0, 224)(image) is image
    spread = [np.asarray(Blur(1.0, 224)(image), np.float32).std() for _ in range(20)]
    assert np.mean(spread) < 0.8 * np.asarray(image, np.float32).std()


def test_crops_are_3_of_7_in_whole_patches():
    assert small_size((224, 224), 16) == (96, 96) and small_size((224, 224), 14) == (98, 98)
    assert small_size((32, 32), 8) == (16, 16) and small_size((64, 32), 16) == (32, 16)
    assert small_size((16, 16), 16) == (16, 16)


@pytest.mark.parametrize("side, allowed", [(40, "32"), (50, "64")])
def test_crops_of_broken_patches_are_refused_also_where_patches_have_32_pixels(dino, side, allowed):
    config = dino(model_kwargs=("patch_size=32", *KWARGS[1:]), img_size=64, local_size=side)
    with pytest.raises(UsageError, match=rf"`--local-size` {side} {side} is not .* of 32 px; give {allowed} {allowed}"):
        make_plan(config.resolved(), CPU)


@pytest.mark.parametrize("name", ["test_mambaout", "mobilenetv3_small_050", "test_vit"])
def test_heads_take_the_features_also_where_a_layer_widens_them_before_the_classifier(dino, name, tmp_path):
    backbone = timm.create_model(name, num_classes=0).eval()
    images = torch.zeros(2, *backbone.pretrained_cfg["input_size"])
    assert Projected(backbone, 4)(images[:, None]).shape == (2, 1, 4)
    plan = make_plan(dino(model=name, model_kwargs=(), img_size=None, local_crops=0, precision="fp32").resolved(), CPU)
    setting = Setting(plan.config, plan.spec, CPU, tmp_path, None, 0)
    assert plan.method.model(backbone, setting).projection(backbone(images)).shape == (2, 8)


class Death(Exception):
    """What a run dies of."""


class Dies(Callback):
    def on_step(self, info):
        if (info.epoch, info.step_in_epoch) == (2, 2):
            raise Death


def test_a_run_that_dies_goes_on_and_leaves_its_teacher(dino, config, tmp_path):
    whole = pretrain(dino())
    with pytest.raises(Death):
        pretrain(dino(out=tmp_path / "parts", save_every="1"), callbacks=[Dies()])
    assert json.loads((tmp_path / "parts/last/state.json").read_text())["step"] == 1
    parts = pretrain(dino(out=tmp_path / "parts", resume=True))
    for file in ("backbone.safetensors", "last/model.safetensors"):
        a, b = (load_file(tmp_path / name / file) for name in ("run", "parts"))
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    timed = ("seconds", "images_per_second")
    rows = [[{k: v for k, v in row.items() if k not in timed} for row in run.rows] for run in (whole, parts)]
    assert rows[0] == rows[1] and read_card(whole.backbone) == read_card(parts.backbone)
    assert all(0 <= row[key] <= 1 for row in rows[0] for key in ("knn_top1", "probe_top1"))
    assert all(row["teacher_entropy"] > 0 and row["teacher_kl"] > 0 for row in rows[0])
    student, teacher = load_file(tmp_path / "run/last/model.safetensors"), load_file(whole.backbone)
    differing = [k for k in teacher if not torch.equal(teacher[k], student[f"backbone.{k}"])]
    assert "blocks.0.attn.qkv.weight" in differing and not any("projection" in k for k in teacher)
    card = read_card(whole.backbone)
    assert card.metrics["views"] == [2, 1] and card.metrics["local_size"] == [16, 16]
    assert card.metrics["knn_top1"] == whole.rows[-1]["knn_top1"] == whole.to_dict()["knn_top1"]
    assert (tmp_path / "run/similarity.png").stat().st_size > 1000
    run = finetune(
        config(
            out=tmp_path / "tuned", weights=whole.backbone, pretrained=True, model_kwargs=KWARGS, train="head", epochs=1
        )
    )
    trained = load_file(run.task / "task.safetensors")
    assert {k for k, v in trained.items() if not torch.equal(v, teacher.get(k, v[:0]))} == {"head.weight", "head.bias"}


def test_scores_are_of_the_kept_backbone_and_the_class_folders(dino, photos):
    """Computed again from the file, by scikit-learn."""
    found = pretrain(dino(epochs=1, knn_k=1))
    model, plain = load_checkpoint(found.backbone).model.eval(), eval_transform(read_card(found.backbone).input)
    audit = scan(photos, show_progress=False)
    parts = []
    for samples in (audit.train, audit.val):
        images = torch.stack([image for image, _ in ImageDataset(samples, plain)])
        with torch.no_grad():
            parts.append((model(images).numpy(), np.array([sample.label for sample in samples])))
    theirs = KNeighborsClassifier(1, metric="cosine").fit(*parts[0]).score(*parts[1])
    assert found.rows[0]["knn_top1"] == pytest.approx(theirs)


def test_a_collapse_is_warned_of(dino, capsys):
    """Photos that differ in colour alone, at a high learning rate."""
    row = pretrain(dino(freeze_prototypes=0)).rows[-1]
    assert row["val_teacher_kl"] < 0.01 and "the outputs have collapsed" in capsys.readouterr().err
    assert Dino().remarks({"val_teacher_kl": 0.02}) == []


def test_16_bits_train_and_the_teacher_stays_in_32(dino):
    """Also with BatchNorms, whose 16-bit casts of the last evaluation must not be in the features that are drawn."""
    stem = {"stem": "conv"}
    half, full = pretrain(dino(precision="bf16", **stem)), pretrain(dino(out=dino().out.with_name("full"), **stem))
    assert half.rows[-1]["loss"] == pytest.approx(full.rows[-1]["loss"], rel=0.05)
    state = torch.load(half.out / "last/state.pt", weights_only=True)
    assert {t.dtype for t in state["ema"]["averages"].values()} == {torch.float32}
    assert state["ema"]["center"].dtype == torch.float32


def test_images_without_classes_have_no_scores(pretraining, drawn):
    small = {"local_crops": 0, "dino_prototypes": 8, "dino_hidden": 8, "dino_bottleneck": 4, "probe": "auto"}
    rows = pretrain(pretraining(method="dino", epochs=1, **small)).rows
    assert "knn_top1" not in rows[0] and rows[0]["val_loss"] > 0
    with pytest.raises(DataError, match=r"`--probe` on: the images of .* are not in two or more class folders"):
        pretrain(pretraining(method="simmim", probe="on", overwrite=True))


def test_other_methods_are_scored_if_asked(dino):
    rows = pretrain(dino(method="simmim", epochs=1, probe="on", local_crops=8, dino_prototypes=65536,
                         dino_hidden=2048, dino_bottleneck=256)).rows  # fmt: skip
    assert 0 <= rows[0]["knn_top1"] <= 1 and 0 <= rows[0]["probe_top1"] <= 1


OTHER = {"method": "mae", "local_crops": 8, "dino_prototypes": 65536, "dino_hidden": 2048, "dino_bottleneck": 256}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ema": 0.9}, "`--ema`: the moving average of --method dino is its teacher, .*--teacher-momentum"),
        ({"method": "mae"}, "`--local-crops` is for --method dino; --method is mae"),
        ({"local_scale": (0.4, 0.1)}, "`--local-scale` is 0.4,0.1; allowed is two areas"),
        ({"sam": 0.1}, "`--sam` is for --method supcon; --method is dino"),
        ({"teacher_temp_start": 0.02}, "`--teacher-temp-start` 0.02 is of the epochs .* --teacher-temp-epochs is 0"),
        ({"teacher_temp_epochs": 3}, "`--teacher-temp-epochs` 3 is more than the 2 of --epochs; give at most 2"),
        ({"local_crops": 0, "local_size": 16}, "`--local-size` is of the small crops, and --local-crops is 0"),
        ({"local_crops": 0, "local_scale": (0.1, 0.2)}, "`--local-scale` is of the small crops"),
        ({"probe": "off", "knn_k": 5}, "`--knn-k` is of the scores of --probe on, which is off"),
        ({**OTHER, "probe_images": 5}, "`--probe-images` is of the scores of --probe on, which is auto"),
        ({"mask_ratio": 0.5}, "`--mask-ratio` is for"),
    ],
)
def test_flags_that_do_not_go_together(dino, changes, message):
    with pytest.raises(UsageError, match=message):
        dino(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_size": 12}, "`--local-size` 12 12 is not a multiple of the patch of 8 px; give 16 16"),
        (
            {"model": "swin_tiny_patch4_window7_224", "model_kwargs": (), "img_size": 224},
            "SwinTransformer does not take crops of 96×96 px .*give --local-crops 0, or --local-size 224 224",
        ),
    ],
)
def test_crops_that_a_model_does_not_take_are_refused_before_images_are_read(dino, changes, message):
    with pytest.raises(UsageError, match=message):
        make_plan(dino(**changes).resolved(), CPU)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {"stem": "conv"},
        {"model": "resnet10t", "model_kwargs": ()},
        {"model": "deit_tiny_distilled_patch16_224"},
        {"model": "swin_tiny_patch4_window7_224", "model_kwargs": ("depths=[1,1]", "embed_dim=16", "num_heads=[2,2]"),
         "img_size": 56, "local_size": 56},
        {"branches": 1, "cb": True, "drop_path": 0.3, "grad_checkpointing": True, "accumulate": 2},
    ],
    ids=["conv stem", "resnet", "distilled", "swin", "cb, drop path, checkpointing"],
)  # fmt: skip
def test_families_train_and_stop_and_go_on(dino, flags, tmp_path):
    whole = pretrain(dino(**flags))
    for i in range(2):
        parts = pretrain(dino(out=tmp_path / "parts", stop_after=1, resume=i > 0, **flags))
    a, b = (load_file(run.backbone) for run in (whole, parts))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert whole.rows[-1]["loss"] == parts.rows[-1]["loss"]


@pytest.mark.slow
def test_features_of_digits_get_better_than_those_of_random_weights(tmp_path, capsys):
    """1,438 digits without classes, two epochs of a plan of ten: k-NN 51.3 → 58.2 %, linear probe 69.9 → 76.9 %."""
    config = PretrainConfig(
        data=write_digits(tmp_path / "digits"), out=tmp_path / "run", method="dino", model="vit_tiny_patch16_224",
        model_kwargs=("patch_size=4", "depth=2", "embed_dim=48", "num_heads=3", "global_pool=avg"), img_size=16,
        epochs=10, stop_after=2, batch_size=32, lr=1e-3, weight_decay=0.04, weight_decay_end=0.04, hflip=0.0,
        dino_colors=False, crop_scale=(0.5, 1.0), local_crops=2, local_scale=(0.3, 0.6), dino_prototypes=256,
        dino_hidden=128, dino_bottleneck=32, teacher_momentum=0.95, teacher_temp=0.03, workers=0, device="cpu",
    )  # fmt: skip
    rows = pretrain(config).rows
    before = re.search(r"before training k-NN ([\d.]+) %, linear probe ([\d.]+) %", capsys.readouterr().out)
    assert 100 * rows[-1]["knn_top1"] > float(before[1]) + 4
    assert 100 * rows[-1]["probe_top1"] > float(before[2]) + 4


@pytest.mark.slow
def test_compiled_steps_are_two_programs_that_give_the_same_losses(dino, monkeypatch, capsys):
    monkeypatch.setattr("vtk.training.engine.compile_passes.BACKEND", "aot_eager")
    plain = pretrain(dino(drop_path=0.2)).rows
    compiled = pretrain(dino(drop_path=0.2, compile=True, overwrite=True)).rows
    assert "--compile: 2 programs compiled" in capsys.readouterr().out  # the teacher's views, and the student's
    for mine, theirs in zip(plain, compiled, strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5)


@pytest.mark.slow
def test_two_processes_do_what_one_does(dino, photos, tmp_path, vtk_home):
    """36 images in batches of 10: the last has 6; the centre is that of both processes' images."""
    one = pretrain(dino(batch_size=10, accumulate=2))
    torchrun = shutil.which("torchrun") or str(Path(sys.executable).with_name("torchrun"))
    argv = [
        torchrun, "--standalone", "--nproc_per_node", "2", "-m", "vtk", "pretrain", str(photos), "--config",
        str(tmp_path / "run/config.yaml"), "--out", str(tmp_path / "two"),
    ]  # fmt: skip
    done = subprocess.run(
        argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "two/metrics.jsonl").read_text().splitlines()]
    for mine, theirs in zip(one.rows, rows, strict=True):
        for key in ("loss", "val_loss", "teacher_entropy", "knn_top1"):
            assert theirs[key] == pytest.approx(mine[key], rel=1e-3), key
    states = [torch.load(tmp_path / name / "last/state.pt", weights_only=True)["ema"] for name in ("run", "two")]
    assert torch.allclose(states[0]["center"], states[1]["center"], atol=1e-4) and states[0]["center"].any()
    mine, theirs = (load_file(p / "backbone.safetensors") for p in (one.out, tmp_path / "two"))
    assert all(torch.allclose(mine[name], theirs[name], atol=1e-4) for name in mine)
