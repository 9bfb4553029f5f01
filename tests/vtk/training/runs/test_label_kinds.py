"""Class weights and balanced drawing in a run."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from vtk.data.audit.result import DataAudit, Sample
from vtk.errors import UsageError
from vtk.training.finetune import finetune, finetune_tasks
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.objectives.base import Batch, Classification
from vtk.training.objectives.multilabel import MultiLabel
from vtk.training.runs.label_kinds import describe, make_objective


class Logits(torch.nn.Module):
    def forward(self, images):
        return images.flatten(1)[:, :4]


@pytest.fixture
def config(config):
    """Runs of one block and a few steps an epoch."""
    small = {"model_kwargs": ("depth=1", "embed_dim=16", "num_heads=2"), "batch_size": 10}
    return lambda **changes: config(**{**small, **changes})


@pytest.fixture(scope="module")
def uneven(photos, tmp_path_factory):
    """The photographs with 12, 6 and 2 training images."""
    root = tmp_path_factory.mktemp("uneven") / "photos"
    shutil.copytree(photos, root)
    for name, count in (("green", 6), ("red", 2)):
        for i in range(count, 12):
            (root / "train" / name / f"{i}.png").unlink()
    return root


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("mixed", [False, True])
def test_weighted_loss_in_fp64_by_hand(smoothing, mixed):
    """An image costs w_a·CE(a); a mixed one λ·w_a·CE(a) + (1 − λ)·w_b·CE(b), each with its own smoothed target."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(7, 3, 8, 8, generator=generator), torch.arange(7) % 4
    weights = [0.5, 2.0, 0.25, 1.5]
    objective = Classification(4, smoothing=smoothing, mixup=0.8 if mixed else 0.0, weights=weights)
    batch = objective.prepare(Batch(images.clone(), labels))
    loss, _ = objective.loss(Logits(), batch)
    log_p = Logits()(batch.images).double().log_softmax(1)
    costs = -((1 - smoothing) * log_p + smoothing * log_p.mean(1, keepdim=True))  # (image, class it may be of)
    by_hand = 0.0
    for i in range(7):
        j = 5 - i if mixed and i < 6 else i
        a, b = images[i].double().flatten(), images[j].double().flatten()
        share = float((batch.images[i].double().flatten() - b) @ (a - b) / ((a - b) @ (a - b))) if i != j else 1.0
        for row, part in ((i, share), (j, 1 - share)):
            by_hand += part * weights[labels[row]] * float(costs[i, labels[row]]) / 7
    assert float(loss) == pytest.approx(by_hand, rel=2e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weights_of_one_change_nothing(smoothing):
    images, labels = torch.randn(7, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(7) % 4
    losses = [
        float(Classification(4, smoothing=smoothing, weights=weights).loss(Logits(), Batch(images, labels))[0])
        for weights in (None, [1.0] * 4)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Classification, MultiLabel])
def test_weighted_loss_of_half_precision_logits_is_computed_in_fp32(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(6, 3, generator=generator) * 4).to(dtype)
    labels = torch.arange(6) % 3 if kind is Classification else (torch.arange(18).view(6, 3) % 4 == 0).float()
    objective = kind(3, smoothing=0.1, weights=[3000.0, 0.1, 40.0])
    batch = objective.prepare(Batch(torch.zeros(6, 3, 2, 2), labels))
    found = objective.criterion(logits, batch)
    assert found.dtype == torch.float32 and torch.equal(found, objective.criterion(logits.float(), batch))
    assert float(found) == pytest.approx(float(objective.criterion(logits.double(), batch)), rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_epoch_with_weights_equals_one_whose_small_classes_are_repeated(tiny, smoothing):
    """In one full batch, weights 20/(3·12), 20/(3·6), 20/(3·2) give the gradient of equally many images of each."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(20, 3, 32, 32, generator=generator)
    labels = torch.tensor([0] * 12 + [1] * 6 + [2] * 2)
    repeated = torch.tensor([*range(12), *[*range(12, 18)] * 2, *[18, 19] * 6])
    model = tiny()
    objective = Classification(3, smoothing=smoothing, weights=[20 / 36, 20 / 18, 20 / 6])
    weighted = objective.loss(model, Batch(images, labels))[0]
    even = Classification(3, smoothing=smoothing).loss(model, Batch(images[repeated], labels[repeated]))[0]
    found = torch.autograd.grad(weighted, model.head.weight)[0]
    wanted = torch.autograd.grad(even, model.head.weight)[0]
    assert torch.allclose(found, wanted, atol=1e-6) and weighted.item() == pytest.approx(even.item(), rel=1e-5)


def test_a_rare_class_does_not_take_the_images_of_a_frequent_one(config, tmp_path):
    """150 reddish and 2 greenish images with the default smoothing: both classes of a balanced validation are right."""
    rng = np.random.default_rng(0)
    root = tmp_path / "rare"
    for part, counts in (("train", (150, 2)), ("val", (10, 10))):
        for channel, (name, count) in enumerate(zip(("reddish", "greenish"), counts, strict=True)):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 120, (20, 20, 3))
                pixels[..., channel] += 100
                Image.fromarray(pixels.astype(np.uint8)).save(root / part / name / f"{i}.png")
    changes = {"data": root, "batch_size": 16, "epochs": 3, "lr": 5e-3, "class_weights": "balanced"}
    assert config(**changes).smoothing > 0
    result = finetune(config(**changes))
    assert result.metrics.confusion.tolist() == [[10, 0], [0, 10]]


@pytest.mark.parametrize("flag", ["class_weights", "sampler"])
def test_a_run_repeats_resumes_and_differs_from_a_plain_one(config, uneven, tmp_path, flag):
    def pack(name, **changes):
        return load_file(finetune(config(data=uneven, out=tmp_path / name, **changes)).task_last / "task.safetensors")

    balanced = {flag: "balanced"}
    whole, plain = pack("whole", **balanced), pack("plain")
    finetune(config(data=uneven, out=tmp_path / "parts", stop_after=1, **balanced))
    parts = pack("parts", resume=True, **balanced)
    assert all(torch.equal(whole[n], parts[n]) for n in whole)
    assert not all(torch.equal(whole[n], plain[n]) for n in whole)
    with pytest.raises(UsageError, match=rf"--{flag.replace('_', '-')} \w+ \(was balanced\)"):
        finetune(config(data=uneven, out=tmp_path / "parts", resume=True))


@pytest.mark.slow
def test_each_task_balances_its_own_classes(config, photos, uneven, tmp_path):
    alone = finetune(config(data=uneven, out=tmp_path / "alone", sampler="balanced", epochs=1, batch_size=20))
    tasks = (f"even={photos}", f"uneven={uneven}")
    changes = {"data": None, "tasks": tasks, "sampler": "balanced", "epochs": 1, "batch_size": 20}
    joint = finetune_tasks(config(out=tmp_path / "joint", **changes)).tasks["uneven"]
    found, wanted = (load_file(run.task_last / "task.safetensors") for run in (joint, alone))
    assert all(torch.allclose(found[n], wanted[n], atol=2e-5) for n in wanted)


def test_both_at_once_are_refused():
    with pytest.raises(UsageError, match="--class-weights` balanced and `--sampler` balanced"):
        FinetuneConfig(class_weights="balanced", sampler="balanced")


@pytest.mark.parametrize("options", [{"class_weights": "balanced"}, {"sampler": "balanced"}, {}])
@pytest.mark.parametrize("metric", ["top1", "balanced_accuracy"])
@pytest.mark.parametrize("held_out", [(2, 2), (2, 1)])
def test_a_metric_in_which_frequent_classes_count_for_more_is_said(options, metric, held_out):
    train, val = (
        [Sample(Path("x.png"), c) for c in range(2) for _ in range(counts[c])] for counts in ((4, 2), held_out)
    )
    audit = DataAudit(Path(), "split", ("a", "b"), tuple(train), tuple(val))
    config = FinetuneConfig(metric=metric, **options)
    lines = describe(config, make_objective(config, audit), audit)
    said = any("--metric balanced_accuracy counts all alike" in line for line in lines)
    assert said == (bool(options) and metric == "top1" and held_out == (2, 1)) and bool(lines) == bool(options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, True), ({"clip_grad": 0.0}, False), ({"batch_size": 38}, False), ({"accumulate": 2}, False),
        ({"class_weights": "none", "sampler": "balanced"}, False),
    ],
)  # fmt: skip
def test_clipping_that_cuts_the_steps_of_a_rare_class_is_said(options, said):
    """The weight of 2 images among 152 is 38."""
    train = [Sample(Path("x.png"), int(i < 2)) for i in range(152)]
    audit = DataAudit(Path(), "split", ("often", "seldom"), tuple(train), ())
    config = FinetuneConfig(**{"class_weights": "balanced", **options})
    lines = describe(config, make_objective(config, audit), audit)
    wanted = "an image of seldom weighs more than a whole step of 32 images, which --clip-grad 1 cuts down"
    assert any(line.startswith(wanted) for line in lines) == said
