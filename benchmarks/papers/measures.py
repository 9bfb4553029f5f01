"""Models of finished runs, and the images used to measure them."""

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from papers.experiment import Job
from vtk.analysis import CrossEntropy, HessianSpectrum, hessian_spectrum
from vtk.data.audit.folder_scan import scan
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.loading.loader import make_loader
from vtk.data.loading.train_pipeline import train_transform
from vtk.packs.load import Task, load_checkpoint

DEVICE = torch.device("cpu")
"""What models are measured on; of the job that this process does."""


def load(weights: Path) -> Task:
    """Return the model of a checkpoint, in eval mode."""
    task = load_checkpoint(weights)
    task.model.to(DEVICE)
    return task


def batches(task: Task, images: Path, part: Literal["train", "val"], most: int) -> list[tuple[Tensor, Tensor]]:
    """Return ``most`` images of a part, as evaluation sees them, spread over the classes."""
    audit = scan(images / "all")
    samples = audit.train if part == "train" else audit.val
    step = max(1, len(samples) // most)
    loader: Any = make_loader(
        samples[::step][:most], eval_transform(task.card.input), batch_size=50, shuffle=False, seed=0, workers=0
    )
    return list(loader)


@torch.no_grad()
def forward_ratio(model: nn.Module, base: nn.Module, images: Tensor, rounds: int = 15) -> float:
    """Return how long a forward pass takes compared with another model's: median over interleaved rounds."""
    ratios, images = [], images.to(DEVICE)
    for _ in range(rounds):
        times = []
        for one in (model, base):
            begin = time.perf_counter()
            one(images)
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        ratios.append(times[0] / times[1])
    return sorted(ratios)[rounds // 2]


def mean(values: Sequence[float]) -> float:
    """Return the mean, NaN of nothing: all runs diverged."""
    return sum(values) / len(values) if values else float("nan")


def around_units(values: Sequence[tuple[str, float | None]]) -> dict[str, dict[Literal["before", "after"], float]]:
    """Return the mean value of the feature maps before and after the units of each kind.

    Args:
        values: kind of a unit and the value of the map after it, in the order of the model, the stem first.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for (_, before), (kind, after) in pairwise(values):
        if before is not None and after is not None:
            own = found.setdefault(kind, {"before": [], "after": []})
            own["before"].append(before)
            own["after"].append(after)
    return {kind: {"before": mean(own["before"]), "after": mean(own["after"])} for kind, own in found.items()}


def spectrum(task: Task, job: Job, options: Mapping[str, Any]) -> HessianSpectrum:
    """Return the largest Hessian eigenvalues of mini-batches, of the loss that was trained (Park and Kim 2022, App. A).

    That is the cross-entropy of augmented training images, and ½·λ·‖w‖² of the run's weight decay λ.

    Args:
        task: the model.
        job: its images, augmentation and seed.
        options: ``images``, ``batch_size`` of the mini-batches, ``top`` values of each, and ``smoothing`` of labels.
    """
    samples = scan(job.images / "all").train
    augmented = train_transform(task.card.input, crop_scale=job.settings["common"]["crop_scale"], hflip=job.hflip)
    chosen = samples[:: max(1, len(samples) // options["images"])][: options["images"]]
    loader: Any = make_loader(
        chosen, augmented, batch_size=options["batch_size"], shuffle=True, seed=job.seed, workers=0
    )
    loss = CrossEntropy(smoothing=options["smoothing"], weight_decay=job.settings["common"]["weight_decay"])
    return hessian_spectrum(task.model, list(loader), loss=loss, top=options["top"], seed=job.seed)
