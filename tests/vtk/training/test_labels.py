"""Class weights and balanced drawing in a run."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from vtk.errors import UsageError
from vtk.training.config import FinetuneConfig
from vtk.training.finetune import finetune, finetune_tasks
from vtk.training.objective import Batch, Classification, smooth


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
    generator = torch.Generator().manual_seed(0)
    batch = Batch(torch.randn(7, 3, 8, 8, generator=generator), torch.arange(7) % 4)
    weights = [0.5, 2.0, 0.0, 1.5]
    objective = Classification(4, smoothing=smoothing, mixup=0.8 if mixed else 0.0, weights=weights)
    batch = objective.prepare(batch)
    loss, _ = objective.loss(Logits(), batch)
    targets = batch.labels.double() if mixed else smooth(batch.labels, 4, smoothing).double()
    log_p = Logits()(batch.images).double().log_softmax(1)
    by_hand = -(targets * torch.tensor(weights).double() * log_p).sum() / 7
    assert float(loss) == pytest.approx(float(by_hand), rel=1e-6)
    assert float(Classification(4, weights=[1.0] * 4).loss(Logits(), Batch(batch.images, torch.arange(7) % 4))[0]) == (
        pytest.approx(float(Classification(4).loss(Logits(), Batch(batch.images, torch.arange(7) % 4))[0]), rel=1e-6)
    )


def test_an_epoch_with_weights_equals_one_whose_small_classes_are_repeated(tiny):
    """In one full batch, weights 20/(3·12), 20/(3·6), 20/(3·2) give the gradient of equally many images of each."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(20, 3, 32, 32, generator=generator)
    labels = torch.tensor([0] * 12 + [1] * 6 + [2] * 2)
    repeated = torch.tensor([*range(12), *[*range(12, 18)] * 2, *[18, 19] * 6])
    model = tiny()
    weighted = Classification(3, weights=[20 / 36, 20 / 18, 20 / 6]).loss(model, Batch(images, labels))[0]
    even = Classification(3).loss(model, Batch(images[repeated], labels[repeated]))[0]
    found = torch.autograd.grad(weighted, model.head.weight)[0]
    wanted = torch.autograd.grad(even, model.head.weight)[0]
    assert torch.allclose(found, wanted, atol=1e-6) and weighted.item() == pytest.approx(even.item(), rel=1e-5)


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
