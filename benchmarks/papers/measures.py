"""Models of finished runs, and the images used to measure them."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vtk.data.audit.folder_scan import scan
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.loading.loader import make_loader
from vtk.packs.load import Task, load_checkpoint


def load(weights: Path) -> Task:
    """Return the model of a checkpoint, in eval mode."""
    return load_checkpoint(weights)


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
    ratios = []
    for _ in range(rounds):
        times = []
        for one in (model, base):
            begin = time.perf_counter()
            one(images)
            times.append(time.perf_counter() - begin)
        ratios.append(times[0] / times[1])
    return sorted(ratios)[rounds // 2]


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)
