"""The largest curvatures of the loss: spectra over mini-batches (paper C) and λ_max of one operator (paper D)."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vtk import console
from vtk.analysis.batches import Batches, hold
from vtk.analysis.eigen import Eigenvalues, Method, top_eigenvalues
from vtk.analysis.losses import CrossEntropy, Loss
from vtk.analysis.second_order import flat_size, hessian_product


@dataclass(frozen=True)
class HessianSpectrum:
    """The largest eigenvalues of each mini-batch's Hessian.

    Attributes:
        values: of each mini-batch, largest magnitude first, with signs.
        converged: share of them that settled.
        images: all mini-batches together.
    """

    values: tuple[tuple[float, ...], ...]
    converged: float
    images: int

    @property
    def negative_share(self) -> float:
        """NEP: share of negative values (paper C)."""
        everything = [v for batch in self.values for v in batch]
        return sum(v < 0 for v in everything) / len(everything)

    @property
    def positive_mean(self) -> float:
        """APE: mean of the positive values (paper C); NaN without any."""
        positive = [v for batch in self.values for v in batch if v > 0]
        return sum(positive) / len(positive) if positive else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "negative_share": self.negative_share, "positive_mean": self.positive_mean}


@dataclass(frozen=True)
class HessianMax:
    """The eigenvalues of largest magnitude of one operator, over all images.

    Attributes:
        values: of each group of parameters, largest magnitude first; ``whole`` is the whole Hessian.
        converged: of each group, whether all settled.
        products: Hessian-vector products, all groups together.
        images: of the operator.
    """

    values: dict[str, tuple[float, ...]]
    converged: dict[str, bool]
    products: int
    images: int

    @property
    def value(self) -> float:
        """λ_max of the whole Hessian, else of the only group."""
        group = "whole" if "whole" in self.values else next(iter(self.values))
        return self.values[group][0]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def hessian_spectrum(
    model: nn.Module,
    batches: Batches,
    *,
    loss: Loss | None = None,
    top: int = 5,
    method: Method = "lanczos",
    max_iter: int = 100,
    tol: float = 1e-3,
    max_images: int | None = None,
    seed: int = 0,
    show_progress: bool = False,
) -> HessianSpectrum:
    """Return the largest Hessian eigenvalues of each mini-batch, the model in eval mode (paper C, §2 and App. A).

    Paper C takes a tenth of the training images in batches of 16, augmented as in training, the top 5 of each, and the
    loss with its l2 term: give a loader of the training transform, and ``CrossEntropy(weight_decay=…)``.

    Raises:
        UsageError: an argument is out of range, or the model has no second derivative.
        DataError: there are no images.
    """
    start, generator = _start(model, dict(model.named_parameters()), seed)
    found: list[Eigenvalues] = []
    images = 0
    criterion = loss or CrossEntropy()
    held = hold(model, batches, max_images)
    with console.progress("Hessian spectrum", sum(len(b[0]) for b in held), enabled=show_progress) as bar:
        for batch in held:
            with hessian_product(model, criterion, [batch]) as product:
                found.append(
                    top_eigenvalues(product, start, top, method=method, max_iter=max_iter, tol=tol, generator=generator)
                )
            images += len(batch[0])
            bar.advance(len(batch[0]))
    flags = [flag for one in found for flag in one.converged]
    return HessianSpectrum(tuple(one.values for one in found), sum(flags) / len(flags), images)


def hessian_max(
    model: nn.Module,
    batches: Batches,
    *,
    loss: Loss | None = None,
    top: int = 1,
    groups: Mapping[str, Mapping[str, nn.Parameter]] | None = None,
    method: Method = "lanczos",
    max_iter: int = 100,
    tol: float = 1e-3,
    max_images: int | None = None,
    seed: int = 0,
    show_progress: bool = False,
) -> HessianMax:
    """Return the eigenvalues of largest magnitude of the Hessian of the mean loss over all images (paper D, App. F).

    Args:
        model: is put into eval mode meanwhile.
        batches: of evaluation's or training's transform; held in memory.
        loss: by default plain cross-entropy.
        top: eigenvalues of each group.
        groups: names to parameters; each group's diagonal block is taken alone, such as those of
            `vtk.analysis.parameter_blocks` (paper D, Table 4). Default the whole.
        method: ``lanczos``, or ``power`` as in the paper.
        max_iter: products at most.
        tol: relative.
        max_images: of the batches, from the first.
        seed: of the start vector.
        show_progress: a bar over the groups.

    Raises:
        UsageError: an argument is out of range, or the model has no second derivative.
        DataError: there are no images.
    """
    held = hold(model, batches, max_images)
    criterion = loss or CrossEntropy()
    chosen = {"whole": dict(model.named_parameters())} if groups is None else {k: dict(v) for k, v in groups.items()}
    values, converged, products = {}, {}, 0
    with console.progress("Hessian", len(chosen), unit="groups", enabled=show_progress) as bar:
        for name, parameters in chosen.items():
            start, generator = _start(model, parameters, seed)
            with hessian_product(model, criterion, held, parameters) as product:
                found = top_eigenvalues(
                    product, start, top, method=method, max_iter=max_iter, tol=tol, generator=generator
                )
            values[name], converged[name] = found.values, all(found.converged)
            products += found.products
            bar.advance(1, name)
    return HessianMax(values, converged, products, sum(len(batch[0]) for batch in held))


def _start(model: nn.Module, parameters: Mapping[str, nn.Parameter], seed: int) -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    size = flat_size(parameters)
    return torch.randn(size, generator=generator).to(next(model.parameters())), generator
