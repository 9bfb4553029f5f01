"""Runs that are smaller than their flags suppose: few images, one image in the last batch, more warm-up than steps."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from vtk.packs import load_task
from vtk.training.engine.param_groups import lr_factor
from vtk.training.engine.step_plan import single_images
from vtk.training.finetune import finetune, finetune_tasks
from vtk.training.objectives.base import Batch

LEVIT = {
    "model": "levit_128s",
    "model_kwargs": ("embed_dim=[16,24,32]", "num_heads=[2,2,2]", "depth=[1,1,1]", "key_dim=8"),
}


def folder(root, counts, size=(24, 24)):
    """A class for each count, of so many images of its own colour."""
    rng = np.random.default_rng(0)
    for label, count in enumerate(counts):
        (root / f"c{label}").mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 90, (*size, 3))
            pixels[..., label % 3] += 120
            Image.fromarray(pixels.astype(np.uint8)).save(root / f"c{label}" / f"{i}.png")
    return root


@pytest.mark.parametrize(
    "changes",
    [
        {"warmup": 0.99},
        {"warmup": 0.99, "epochs": 1, "accumulate": 9},
        {"mixup": 0.8, "cutmix": 1.0, "batch_size": 3},
    ],
    ids=["warm-up of all steps", "one step", "mixed odd batches"],
)
def test_six_images_and_a_batch_of_64_train(config, tmp_path, changes):
    result = finetune(config(data=folder(tmp_path / "six", (3, 3)), **{"batch_size": 64, "val_split": 0.34, **changes}))
    assert result.metrics.count == 2 and result.metrics.top5 == 1.0  # of two classes
    assert all(math.isfinite(row["loss"]) and 0 < row["lr"] <= 2e-3 for row in result.rows)
    load_task(result.task)


def test_tasks_of_six_images_train_together(config, tmp_path):
    roots = [folder(tmp_path / name, counts) for name, counts in (("a", (3, 3)), ("b", (2, 2, 2)))]
    tasks = tuple(f"{root.name}={root}" for root in roots)
    result = finetune_tasks(config(data=None, tasks=tasks, batch_size=64, val_split=0.34, warmup=0.9))
    assert {name: len(load_task(r.task).card.classes) for name, r in result.tasks.items()} == {"a": 2, "b": 3}


@pytest.mark.parametrize("total", [1, 2, 3, 10])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5, 0.99])
def test_a_schedule_of_few_steps_stays_between_0_and_1(total, warmup):
    factors = [lr_factor(step, total, warmup, 0.0) for step in range(total + 2)]
    assert all(0 <= f <= 1 for f in factors) and factors[0] > 0
    assert max(factors) == 1.0


def test_a_last_batch_of_one_trains_a_model_with_batchnorm(config, tmp_path):
    """In LeViT's last stage a 32 px image is one token, so its BatchNorms see (B, C): torch refuses a B of 1."""
    data = folder(tmp_path / "five", (4, 4))
    result = finetune(config(data=data, val_split=0.4, batch_size=4, **LEVIT))  # 4 + 1 training images
    state = load_task(result.task_last).model.state_dict()
    assert len(result.rows) == 2 and all(v.isfinite().all() for v in state.values())
    counters = {int(v) for k, v in state.items() if k.endswith("num_batches_tracked")}
    assert counters == {0, 2}  # frozen ones, and of the others one batch of four an epoch: one image tells nothing


def test_one_image_leaves_statistics_alone_and_others_do_not():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.BatchNorm1d(4 * 4)).train()
    with torch.no_grad():
        model[1].running_mean.fill_(0.5)
    labels = torch.zeros(1, dtype=torch.int64)
    for images, kept in ((torch.randn(1, 3, 2, 2), True), (torch.randn(2, 3, 2, 2), False)):
        before = {k: v.clone() for k, v in model.state_dict().items() if "running" in k}
        with single_images(model, [Batch(images, labels)]):
            out = model(images)
        assert all(m.training for m in model.modules())
        same = all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())
        assert same == kept
    one = torch.randn(1, 3, 2, 2)
    with single_images(model, [Batch(one, labels)]):
        out = model(one)
    assert torch.equal(out, model.eval()(one))
