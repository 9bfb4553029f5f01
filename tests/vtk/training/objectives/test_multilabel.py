"""Images with several labels: the loss by hand, and a run from the table to the labels of new images."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from vtk.commands import eval as eval_command
from vtk.commands import predict as predict_command
from vtk.errors import UsageError
from vtk.packs.cards import read_card
from vtk.training.finetune import finetune, finetune_tasks
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.objectives.base import Batch
from vtk.training.objectives.multilabel import MultiLabel, positive_weights

NAMES = ("red", "green", "blue")


class Logits(torch.nn.Module):
    def forward(self, images):
        return images.flatten(1)[:, :4]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """48 images whose channels are bright or dark independently of each other, and the names of the bright ones."""
    root = tmp_path_factory.mktemp("multi")
    rng = np.random.default_rng(0)
    lines = ["path,labels,split\n"]
    for i in range(48):
        bright = [c for c in range(3) if (i >> c) & 1]
        pixels = rng.integers(0, 60, (20, 20, 3))
        pixels[..., bright] += 190
        Image.fromarray(pixels.astype(np.uint8)).save(root / f"{i}.png")
        lines.append(f"{i}.png,{';'.join(NAMES[c] for c in bright)},{'val' if i % 4 == 3 or i >= 40 else 'train'}\n")
    (root / "labels.csv").write_text("".join(lines))
    return root / "labels.csv"


def some(n):
    generator = torch.Generator().manual_seed(n)
    labels = (torch.rand(n, 4, generator=generator) < 0.4).float()
    return Batch(torch.randn(n, 3, 8, 8, generator=generator), labels)


@pytest.mark.parametrize("weights", [None, [1.0, 3.0, 0.5, 2.0]])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_in_fp64_by_hand(smoothing, weights):
    """An image that has a label costs w·BCE, one that has not BCE, each with its own smoothed target."""
    objective = MultiLabel(4, smoothing=smoothing, weights=weights)
    batch = some(7)
    loss, _ = objective.loss(Logits(), objective.prepare(batch))
    p = Logits()(batch.images).double().sigmoid()
    on, off = 1 - smoothing + smoothing / 4, smoothing / 4
    having, lacking = (-(t * p.log() + (1 - t) * (1 - p).log()) for t in (on, off))
    w = torch.tensor(weights or [1.0] * 4).double()
    by_hand = torch.where(batch.labels > 0, w * having, lacking).mean()
    assert float(loss) == pytest.approx(float(by_hand), rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weights_equal_images_that_come_again(smoothing):
    """One label that 2 of 20 images have, whose weight is 9: the optimum of its loss is that of 18 against 18."""
    labels = torch.tensor([[1.0]] * 2 + [[0.0]] * 18)
    weighted, plain = MultiLabel(1, smoothing=smoothing, weights=[9.0]), MultiLabel(1, smoothing=smoothing)
    logits = torch.linspace(-3, 3, 20, dtype=torch.float64)[:, None].requires_grad_()
    again = torch.tensor([0, 1] * 9 + [*range(2, 20)])
    losses = [
        objective.criterion(logits[rows], objective.prepare(Batch(torch.zeros(len(rows), 3, 2, 2), labels[rows])))
        for objective, rows in ((weighted, torch.arange(20)), (plain, again))
    ]
    found, wanted = (torch.autograd.grad(loss * n, logits)[0] for loss, n in zip(losses, (20, 36), strict=True))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


def test_a_rare_label_is_not_given_to_every_image(config, tmp_path):
    """60 images, 2 of them with a bright channel: with weights and the default smoothing only such are said to be."""
    rng = np.random.default_rng(0)
    lines = ["path,labels,split\n"]
    for i in range(80):
        rare, common = (i < 2 or i >= 70), i % 2 == 0
        pixels = rng.integers(0, 60, (20, 20, 3))
        pixels[..., [0] * rare + [1] * common] += 190
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"{i}.png")
        names = ["rare"] * rare + ["common"] * common
        lines.append(f"{i}.png,{';'.join(names)},{'val' if i >= 60 else 'train'}\n")
    (tmp_path / "labels.csv").write_text("".join(lines))
    changes = {"data": tmp_path / "labels.csv", "multi_label": True, "epochs": 8, "lr": 8e-3, "hflip": 0.0}
    assert config(**changes).smoothing > 0
    result = finetune(config(class_weights="balanced", metric="macro_f1", **changes))
    assert result.metrics.macro_f1 > 0.9


@pytest.mark.parametrize(("labels", "smoothing"), [(1, 0.5), (5, 0.7), (80, 0.51)])
def test_smoothing_that_leaves_no_label_more_likely_than_not_is_refused(labels, smoothing):
    with pytest.raises(UsageError, match="which probability ½ does not tell apart") as refused:
        MultiLabel(labels, smoothing=smoothing)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_images_and_labels_are_mixed_alike(n):
    objective, before = MultiLabel(4, mixup=0.8), some(n)
    objective.start_epoch(3)
    after = objective.prepare(Batch(before.images.clone(), before.labels.clone()))
    objective.start_epoch(3)
    again = objective.prepare(Batch(before.images.clone(), before.labels.clone()))
    assert torch.equal(after.images, again.images) and torch.equal(after.labels, again.labels)
    even = n // 2 * 2
    for i in range(even):
        a, b = before.images[i].double().flatten(), before.images[even - 1 - i].double().flatten()
        share = float((after.images[i].double().flatten() - b) @ (a - b) / ((a - b) @ (a - b)))
        expected = share * before.labels[i] + (1 - share) * before.labels[even - 1 - i]
        assert torch.allclose(after.labels[i], expected.float(), atol=1e-5)
    if n % 2:
        assert torch.equal(after.images[-1], before.images[-1]) and torch.equal(after.labels[-1], before.labels[-1])


def test_positive_weights_are_the_ratio_of_images():
    labels = [np.array(row, dtype=np.float32) for row in ([1, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1])]
    assert positive_weights(labels, 3) == [3.0, 1.0, 1.0]


def test_from_the_table_to_the_labels_of_new_images(config, table, tmp_path, capsys):
    changes = {"data": table, "multi_label": True, "epochs": 6, "lr": 8e-3, "class_weights": "balanced", "ema": 0.5}
    result = finetune(config(**changes))
    card = read_card(result.task)
    assert card.multi_label and card.classes == ("blue", "green", "red")
    assert result.metrics.mAP > 0.9 and result.to_dict()["mAP"] == card.metrics["mAP"] == result.metrics.mAP
    assert not (result.out / "confusion.png").exists()
    rows = list(csv.DictReader((result.out / "per_class.csv").open()))
    assert [r["class"] for r in rows] == list(card.classes) and float(rows[0]["average_precision"]) > 0.5
    capsys.readouterr()
    assert eval_command.main([str(result.task), str(table), "--out", str(tmp_path / "eval"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["mAP"] == told["training_mAP"] == result.metrics.mAP and told["loss"] == result.metrics.loss
    out = tmp_path / "labels.csv"
    argv = [str(result.task), str(table.parent), "--out", str(out), "--threshold", "0.5", "--json"]
    assert predict_command.main(argv) == 0
    told = json.loads(capsys.readouterr().out)["predictions"]
    truth = {r["path"]: set(filter(None, r["labels"].split(";"))) for r in csv.DictReader(table.open())}
    right = sum(set(p["labels"]) == truth[p["path"].rpartition("/")[2]] for p in told)
    assert right > 30 and all(min(p["scores"], default=1) >= 0.5 for p in told)
    written = list(csv.DictReader(out.open()))
    assert [r["labels"].split(";") if r["labels"] else [] for r in written] == [p["labels"] for p in told]


def test_it_resumes_exactly_and_the_flag_belongs_to_the_run(config, table, tmp_path):
    changes = {"data": table, "multi_label": True, "epochs": 2, "mixup": 0.8, "metric": "micro_f1", "patience": 5}
    whole = finetune(config(out=tmp_path / "whole", **changes))
    finetune(config(out=tmp_path / "parts", stop_after=1, **changes))
    parts = finetune(config(out=tmp_path / "parts", resume=True, **changes))
    for name in ("task/task.safetensors", "task-last/task.safetensors", "task/task.json"):
        assert (whole.out / name).read_bytes() == (parts.out / name).read_bytes(), name
    assert (whole.metrics.table == parts.metrics.table).all()


@pytest.mark.slow
def test_tasks_of_one_run_are_those_of_runs_of_their_own(config, table, tmp_path):
    changes = {"multi_label": True, "epochs": 1, "batch_size": 64}
    alone = finetune(config(data=table, out=tmp_path / "alone", **changes))
    tasks = (f"a={table}", f"b={table.parent}")
    joint = finetune_tasks(config(data=None, tasks=tasks, out=tmp_path / "joint", **changes))
    packs = [load_file(run.task_last / "task.safetensors") for run in (alone, joint.tasks["a"], joint.tasks["b"])]
    assert all(torch.allclose(packs[0][n], p[n], atol=2e-4) for p in packs[1:] for n in packs[0])
    assert joint.tasks["b"].metrics.mAP == pytest.approx(alone.metrics.mAP, abs=0.05)


@pytest.mark.slow
def test_softmax_of_several_labels_is_refused_and_the_file_carries_the_card(config, table, tmp_path, capsys):
    from vtk.commands import export as export_command

    result = finetune(config(data=table, multi_label=True, epochs=1))
    with pytest.raises(UsageError, match="--softmax` is for single-label models"):
        export_command.main(["onnx", str(result.task), "--out", str(tmp_path / "soft"), "--softmax"])
    assert export_command.main(["onnx", str(result.task), "--out", str(tmp_path / "onnx")]) == 0
    capsys.readouterr()
    assert eval_command.main([str(tmp_path / "onnx" / "model.onnx"), str(table), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mAP"] == pytest.approx(result.metrics.mAP, abs=1e-6)
    red = tmp_path / "photos" / "red"  # a folder is one of the labels, of whatever else is in the image
    red.mkdir(parents=True)
    shutil.copy(table.parent / "3.png", red)
    argv = ["onnx", str(result.task), "--out", str(tmp_path / "half"), "--dtype", "fp16", "--data", str(red.parent)]
    assert export_command.main(argv) == 0
    assert "top-1" not in capsys.readouterr().err
    with pytest.raises(UsageError, match="is multi-label, and `--backend python` returns one label"):
        export_command.main(["triton", str(result.task), "--backend", "python", "--out", str(tmp_path / "models")])


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"multi_label": True, "metric": "top1"}, "--metric` top1 is not one of images with several labels"),
        ({"multi_label": True, "sampler": "balanced"}, "give --class-weights balanced"),
        ({"label_separator": "|"}, "--label-separator` needs --multi-label; give both"),
        ({"multi_label": True, "label_separator": "and"}, "comma, semicolon, tab, space, pipe, or one character"),
    ],
)
def test_bad_values_are_refused(values, text):
    with pytest.raises(UsageError, match=text):
        FinetuneConfig(**values)


def test_a_threshold_is_for_several_labels(config, photos):
    result = finetune(config(epochs=1))
    with pytest.raises(UsageError, match="--threshold` is for multi-label models"):
        predict_command.main([str(result.task), str(photos / "val"), "--threshold", "0.3"])
