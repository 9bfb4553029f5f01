"""Loss on held-out images, with the same masks in every epoch and for any number of processes."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from vtk.data.loading.samplers import mix
from vtk.training.engine.processes import Ranks
from vtk.training.engine.streams import share
from vtk.training.objectives.base import Batch, Objective
from vtk.training.pretrain.seeds import HELD_OUT, seeds_of


class HeldOut:
    """Computes the training objective on held-out images.

    Args:
        loader: of held-out images, in order.
        objective: what is minimised.
        ranks: this process and the others; each takes every W-th batch.
        seed: of the run, if labels are indices of images; None if they are classes.
    """

    def __init__(self, loader: DataLoader[Any], objective: Objective, ranks: Ranks, *, seed: int | None) -> None:
        self.loader, self.objective, self.ranks, self.seed = loader, objective, ranks, seed

    @torch.no_grad()
    def score(self, model: nn.Module) -> dict[str, float]:
        """Return ``loss`` and the objective's other numbers, as means over images; ``model`` is in eval mode."""
        ranks = self.ranks
        mine: list[tuple[int, dict[str, float]]] = []
        for i, (images, labels) in enumerate(share(self.loader, ranks, whole=True)):
            ranks.check()
            number = i * ranks.world + ranks.rank
            # the random numbers of a batch do not depend on the process
            self.objective.start_epoch(mix(self.seed or 0, HELD_OUT, number))
            targets = labels if self.seed is None else seeds_of(labels, self.seed, HELD_OUT)
            batch = self.objective.prepare(Batch(images, targets).to(ranks.device))
            loss, numbers = self.objective.loss(model, batch)
            mine.append((len(images), {"loss": float(loss), **{k: float(v) for k, v in numbers.items()}}))
        parts = ranks.gather(mine)
        batches = [parts[i % ranks.world][i // ranks.world] for i in range(sum(map(len, parts)))]
        total = sum(count for count, _ in batches)
        return {key: sum(count * values[key] for count, values in batches) / total for key in batches[0][1]}
