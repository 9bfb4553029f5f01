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
    """A network of two layers for 6×6 px, and a job with twelve images of three classes."""
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in "abc":
            folder = tmp_path / "all" / part / name
            folder.mkdir(parents=True)
            for i in range(4):
                Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    torch.manual_seed(0)
    layers = torch.nn.Linear(108, 2), torch.nn.Tanh(), torch.nn.Linear(2, 3)
    model = torch.nn.Sequential(torch.nn.Flatten(), *layers).double()
    spec = InputSpec(height=6, width=6, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    task = Opened(model, Card(model="small", classes=("a", "b", "c"), input=spec))
    job = Job({"common": {"crop_scale": (1.0, 1.0), "weight_decay": 0.7}}, tmp_path, {}, 0.0, 0, tmp_path / "runs")
    return task, job


OPTIONS = {"images": 12, "batch_size": 12, "top": 4, "smoothing": 0.2}


def dense(task: Task, job: Job, smoothing: float, weight_decay: float, mirrored: bool = False) -> np.ndarray:
    """Return 4 eigenvalues of largest magnitude of the Hessian of the smoothed cross-entropy with ½·λ·‖w‖²."""
    images, labels = (torch.cat(part) for part in zip(*batches(task, job.images, "train", 12), strict=True))
    x = (images.flip(3) if mirrored else images).double().flatten(1)
    shapes = [p.shape for p in task.model.parameters()]

    def loss(flat):
        parts = flat.split([shape.numel() for shape in shapes])
        w1, b1, w2, b2 = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        log_p = torch.log_softmax((x @ w1.T + b1).tanh() @ w2.T + b2, 1)
        target = F.one_hot(labels, 3) * (1 - smoothing) + smoothing / 3
        return -(target * log_p).sum(1).mean() + weight_decay / 2 * flat.square().sum()

    flat = torch.cat([p.detach().flatten() for p in task.model.parameters()])
    values = np.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat).numpy())
    return values[np.argsort(-abs(values))][:4]


def test_the_spectrum_is_that_of_the_loss_with_smoothing_and_l2_term(small):
    found = spectrum(*small, OPTIONS).values[0]
    assert found == pytest.approx(dense(*small, 0.2, 0.7), rel=1e-3)
    for other in ((0.0, 0.7), (0.2, 0.0)):
        assert found != pytest.approx(dense(*small, *other), rel=1e-3)


def test_the_spectrum_is_of_augmented_images(small):
    task, job = small
    plain = spectrum(task, job, OPTIONS).values[0]
    job.settings["common"]["crop_scale"] = (0.2, 0.5)
    assert plain != pytest.approx(spectrum(task, job, OPTIONS).values[0], rel=0.01)
    job.settings["common"]["crop_scale"], job.hflip = (1.0, 1.0), 1.0
    assert spectrum(task, job, OPTIONS).values[0] == pytest.approx(dense(*small, 0.2, 0.7, mirrored=True), rel=1e-3)
    assert plain != pytest.approx(dense(*small, 0.2, 0.7, mirrored=True), rel=1e-3)
