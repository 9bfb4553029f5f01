"""Evaluation during training, by one process or several."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from vtk.data.cpus import usable_cpus
from vtk.evaluation.metrics import evaluate
from vtk.training.engine.processes import Ranks
from vtk.training.engine.streams import share


def default_workers(workers: int | None, processes: int = 1) -> int:
    """Return the number of loading processes; by default the usable cores are divided among the training processes."""
    return workers if workers is not None else max(1, min(8, usable_cpus() // processes))


def evaluate_ranks(
    model: nn.Module, loader: DataLoader[Any], classes: tuple[str, ...], ranks: Ranks, *, show_progress: bool,
    score: Callable[..., Any] = evaluate,
) -> Any:  # fmt: skip
    """Evaluate ``model`` with all processes; the metrics do not depend on their number.

    Each process runs whole batches, every W-th one, so that a batch holds the same images as in a single process; the
    logits are then gathered and scored in order, by `vtk.evaluation.evaluate` or what ``score`` is.
    """
    dtype = next((p.dtype for p in model.parameters()), torch.float32)

    def predict(images: Tensor) -> Tensor:
        ranks.check()
        images = images.to(ranks.device, non_blocking=True)
        logits: Tensor = model(images.to(dtype) if dtype in (torch.bfloat16, torch.float16) else images)
        return logits

    if ranks.world == 1:
        return score(predict, loader, classes, device=ranks.device, show_progress=show_progress)
    mine = []
    with torch.no_grad():
        for images, labels in share(loader, ranks, whole=True):
            mine.append((predict(images).float().cpu(), labels))
    parts = ranks.gather(mine)
    batches = [parts[i % ranks.world][i // ranks.world] for i in range(sum(map(len, parts)))]
    return score(lambda logits: logits, batches, classes, show_progress=False)
