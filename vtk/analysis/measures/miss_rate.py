"""Miss rate at the mean of two images (Chen et al. 2022, §4.5, after Zhang et al. 2018)."""

from dataclasses import dataclass

import torch
from torch import nn

from vtk.analysis.measures.results import MeasureResult
from vtk.analysis.probes.batches import Batches, eval_mode, load_batches
from vtk.errors import NoResultError, UsageError


@dataclass(frozen=True)
class MissRate(MeasureResult):
    """Share of pairs whose mean image is taken for neither of their classes.

    Attributes:
        rate: R, from 0 to 1.
        pairs: number of pairs.
    """

    rate: float
    pairs: int


@torch.no_grad()
def miss_rate(model: nn.Module, batches: Batches, *, max_images: int | None = None, seed: int = 0) -> MissRate:
    """Return the share of misses at x = ½xᵢ + ½xⱼ: the prediction is neither yᵢ nor yⱼ.

    Every image is paired with one other, by a random cycle through all images.

    Raises:
        UsageError: labels are weights of several classes.
        NoResultError: there are fewer than two images.
    """
    held = load_batches(model, batches, max_images)
    if any(labels.ndim != 1 for _, labels in held):
        raise UsageError("the miss rate needs one label per image; give images that are not mixed")
    images = torch.cat([images for images, _ in held])
    labels = torch.cat([labels for _, labels in held])
    if len(images) < 2:
        raise NoResultError("the miss rate needs two images or more")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)).to(images.device)
    other = order.roll(1)
    misses = 0
    size = len(held[0][0])
    with eval_mode(model):
        for i in range(0, len(images), size):
            first, second = order[i : i + size], other[i : i + size]
            predicted = model(0.5 * (images[first] + images[second])).argmax(dim=1)
            misses += int(((predicted != labels[first]) & (predicted != labels[second])).sum())
    return MissRate(misses / len(images), len(images))
