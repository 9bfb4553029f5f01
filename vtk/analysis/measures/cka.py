"""Mini-batch CKA between a model's units (Nguyen et al. 2021; Park and Kim 2022, Figures 10a and D.3)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vtk.analysis.figures import Unit as Kind
from vtk.analysis.measures.results import MeasureResult
from vtk.analysis.probes.batches import Batches, eval_mode, stream
from vtk.analysis.probes.residual_units import residual_units, watch_units
from vtk.errors import UsageError

LEAST = 4
"""Images of a batch: the unbiased estimate divides by B − 3."""


@dataclass(frozen=True)
class FeatureSimilarity(MeasureResult):
    """Linear CKA of every pair of a model's units.

    Attributes:
        names: of the units in order, as `vtk.analysis.probes.residual_units.residual_units` has them.
        kinds: of the units.
        similarity: symmetric, a row for each unit: 1 for features that are equal up to rotation and scale, about 0 for
            independent ones; None where a unit gives every image the same.
        images: number of images.
        left_out: images of batches of fewer than four.
    """

    names: tuple[str, ...]
    kinds: tuple[Kind, ...]
    similarity: tuple[tuple[float | None, ...], ...]
    images: int
    left_out: int


@torch.no_grad()
def feature_similarity(model: nn.Module, batches: Batches, *, max_images: int | None = None) -> FeatureSimilarity:
    """Return the mini-batch CKA of all pairs of residual units, the model in eval mode.

    The features of an image are all its tokens and channels in one vector, class and register tokens too. From a batch
    come the unbiased estimates HSIC(K, L) of all pairs (`hsic`); their sums over the batches, each with the weight of
    its images, give CKA = HSIC(K, L) / √(HSIC(K, K)·HSIC(L, L)), divided once at the end. So the size of the batches
    has no systematic effect, unlike a mean of the batches' own CKAs.

    Memory: (B, B) numbers in fp64 for each unit, and the features of one unit at a time.

    Args:
        model: of any kind that `vtk.analysis.probes.residual_units` supports.
        batches: of four images or more, labels unused; smaller ones are left out.
        max_images: use only the first ones.

    Raises:
        UsageError: the model has no recognised blocks, or all batches are too small.
        DataError: there are no images.
    """
    units = residual_units(model)
    grams: dict[int, Tensor] = {}
    sums: Tensor | None = None
    images = left_out = 0

    def see(number: int, features: Tensor) -> None:
        grams[number] = centred_gram(features)

    with eval_mode(model), watch_units(units, see):
        for batch, _ in stream(model, batches, max_images):
            if len(batch) < LEAST:
                left_out += len(batch)
                continue
            grams.clear()
            model(batch)
            missing = [unit.name for number, unit in enumerate(units) if number not in grams]
            if missing:
                raise UsageError(f"`{missing[0]}` did not run, so that its features are not known")
            part = hsic(torch.stack([grams[number] for number in range(len(units))])) * len(batch)
            sums = part if sums is None else sums + part
            images += len(batch)
    if sums is None:
        raise UsageError(f"CKA needs batches of {LEAST} images or more, and all have fewer; give more images")
    scale = sums.diagonal().sqrt()
    cka = (sums / (scale[:, None] * scale)).cpu()
    rows = tuple(tuple(value if value == value else None for value in row) for row in cka.tolist())
    return FeatureSimilarity(tuple(u.name for u in units), tuple(u.kind for u in units), rows, images, left_out)


def centred_gram(features: Tensor) -> Tensor:
    """Return the U-centred Gram matrix (B, B) in fp64 of features (B, …), B above 2; its diagonal is 0.

    K̃ᵢⱼ = Kᵢⱼ − Σⱼ Kᵢⱼ/(B−2) − Σᵢ Kᵢⱼ/(B−2) + Σ K/((B−1)(B−2)) of K with a diagonal of zeros. A shift of all features
    does not change it; the mean is taken off before the product, where it would cost digits.
    """
    flat = features.flatten(1)
    flat = flat - flat.mean(dim=0)
    gram = (flat @ flat.T).double()
    n = len(gram)
    gram.fill_diagonal_(0)
    means = gram.sum(dim=0) / (n - 2)
    means = means - means.sum() / (2 * (n - 1))
    gram = gram - means[:, None] - means
    return gram.fill_diagonal_(0)


def hsic(grams: Tensor) -> Tensor:
    """Return the unbiased HSIC of all pairs of U-centred Gram matrices (U, B, B): Σᵢⱼ K̃ᵢⱼL̃ᵢⱼ / (B(B−3)), (U, U)."""
    n = grams.shape[-1]
    flat = grams.flatten(1)
    return flat @ flat.T / (n * (n - 3))
