"""What the papers' experiments measure beside `vtk.analysis`: maps around units, curvature of the trained loss."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from papers.experiment import Job
from papers.measures import around_units, batches, spectrum
from PIL import Image

from vtk.card import Card, InputSpec
from vtk.packs.load import Task


def test_a_map_before_a_unit_is_the_map_after_the_unit_before_it():
    values = [("other", 1.0), ("msa", 3.0), ("mlp", 4.0), ("msa", 10.0), ("mlp", None), ("msa", 5.0), ("mlp", 7.0)]
    assert around_units(values) == {
        "msa": {"before": (1.0 + 4.0) / 2, "after": (3.0 + 10.0) / 2},  # not the unit after a map that there is not
        "mlp": {"before": (3.0 + 5.0) / 2, "after": (4.0 + 7.0) / 2},
    }


@dataclass
class Opened:
    """What `spectrum` reads of a task."""

    model: torch.nn.Module
    card: Card


@pytest.fixture
def small(tmp_path):
    """A linear classifier of 6×6 px, and a job with twelve images of three classes."""
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in "abc":
            folder = tmp_path / "all" / part / name
            folder.mkdir(parents=True)
            for i in range(4):
                Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(108, 3)).double()
    spec = InputSpec(height=6, width=6, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    task = Opened(model, Card(model="linear", classes=("a", "b", "c"), input=spec))
    job = Job({"common": {"crop_scale": (1.0, 1.0), "weight_decay": 0.7}}, tmp_path, {}, 0.0, 0, tmp_path / "runs")
    return task, job


OPTIONS = {"images": 12, "batch_size": 12, "top": 4, "smoothing": 0.2}


def dense(task: Task, job: Job, smoothing: float, weight_decay: float, mirrored: bool = False) -> np.ndarray:
    """Return the eigenvalues of the Hessian of the mean smoothed cross-entropy and ½·λ·‖w‖², the largest first."""
    images, labels = (torch.cat(part) for part in zip(*batches(task, job.images, "train", 12), strict=True))
    images = images.flip(3) if mirrored else images
    weight, bias = task.model[1].weight, task.model[1].bias

    def loss(flat):
        w, b = flat[: weight.numel()].view_as(weight), flat[weight.numel() :]
        log_p = torch.log_softmax(images.double().flatten(1) @ w.T + b, 1)
        target = F.one_hot(labels, 3) * (1 - smoothing) + smoothing / 3
        return -(target * log_p).sum(1).mean() + weight_decay / 2 * flat.square().sum()

    flat = torch.cat([weight.detach().flatten(), bias.detach()])
    return np.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat).numpy())[::-1]


def test_the_spectrum_is_that_of_the_loss_with_smoothing_and_l2_term(small):
    found = spectrum(*small, OPTIONS).values[0]
    assert found == pytest.approx(dense(*small, 0.2, 0.7)[:4], rel=1e-3)
    assert max(abs(dense(*small, 0.2, 0.0)[:4] - found)) == pytest.approx(0.7, rel=0.01)  # what the l2 term adds


def test_the_spectrum_is_of_augmented_images(small):
    task, job = small
    plain = spectrum(task, job, OPTIONS).values[0]
    job.settings["common"]["crop_scale"] = (0.2, 0.5)
    cropped = spectrum(task, job, OPTIONS).values[0]
    assert plain != pytest.approx(cropped, rel=0.01)
    job.settings["common"]["crop_scale"], job.hflip = (1.0, 1.0), 1.0
    assert spectrum(task, job, OPTIONS).values[0] == pytest.approx(dense(*small, 0.2, 0.7, mirrored=True)[:4], rel=1e-3)
    assert plain != pytest.approx(dense(*small, 0.2, 0.7, mirrored=True)[:4], rel=1e-3)
