"""Largest Hessian eigenvalues: of mini-batches (Park and Kim 2022), or over all images (Chen et al. 2022)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from vtk import console
from vtk.analysis.measures.results import MeasureResult
from vtk.analysis.probes.batches import Batches, load_batches
from vtk.analysis.probes.eigenvalues import Eigenvalues, Method, top_eigenvalues
from vtk.analysis.probes.losses import CrossEntropy, Loss
from vtk.analysis.probes.second_order import flat_size, hessian_product
from vtk.analysis.probes.share import ALONE, StepOptions, check_keywords


@dataclass(frozen=True)
class HessianSpectrum:
    """The largest eigenvalues of each mini-batch's Hessian.

    Attributes:
        values: of each mini-batch, largest magnitude first, with signs.
        converged: share of them that converged.
        images: number of images, over all mini-batches.
    """

    values: tuple[tuple[float, ...], ...]
    converged: float
    images: int

    @property
    def negative_share(self) -> float:
        """NEP: share of negative values (Park and Kim 2022)."""
        everything = [v for batch in self.values for v in batch]
        return sum(v < 0 for v in everything) / len(everything)

    @property
    def positive_mean(self) -> float:
        """APE: mean of the positive values (Park and Kim 2022); NaN without any."""
        positive = [v for batch in self.values for v in batch if v > 0]
        return sum(positive) / len(positive) if positive else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "negative_share": self.negative_share, "positive_mean": self.positive_mean}


@dataclass(frozen=True)
class HessianMax(MeasureResult):
    """The eigenvalues of largest magnitude of one operator, over all images.

    Attributes:
        values: of each group of parameters, largest magnitude first; ``whole`` is the whole Hessian.
        converged: of each group, whether all converged.
        products: Hessian-vector products, all groups together.
        images: number of images.
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
    **steps: Unpack[StepOptions],
) -> HessianSpectrum:
    """Return the largest Hessian eigenvalues of each mini-batch, in eval mode (Park and Kim 2022, §2 and App. A).

    Park and Kim (2022) take a tenth of the training images in batches of 16, augmented as in training, the top 5 of
    each, and the loss with its l2 term: give a loader of the training transform, and ``CrossEntropy(weight_decay=…)``.

    Memory: all images, a gradient's graph of one batch, and the iteration's vectors
    (`vtk.analysis.probes.eigenvalues`).

    Args:
        model: in eval mode during the call.
        batches: the mini-batches; held in memory.
        loss: by default plain cross-entropy.
        top: eigenvalues of each mini-batch.
        method: ``lanczos``, or ``power`` as in the paper.
        max_iter: products at most, of each mini-batch; with ``power`` of each value.
        tol: relative tolerance.
        max_images: use only the first ones.
        seed: of the start vector, the same for all mini-batches.
        steps: how mini-batches are resumed, saved, divided between processes and shown.

    Raises:
        UsageError: an argument is out of range, or the model has no second derivative.
        DataError: there are no images.
    """
    check_keywords("hessian_spectrum", steps, StepOptions)
    criterion = loss or CrossEntropy()
    held = load_batches(model, batches, max_images)
    device, width = held[0][0].device, 2 * top + 1
    share = steps.get("share", ALONE)
    sizes = [len(batch[0]) for batch in held]

    def spectrum(index: int) -> list[float]:
        start, generator = _start(model, dict(model.named_parameters()), seed)
        with hessian_product(model, criterion, [held[index]]) as product:
            return _row(
                top_eigenvalues(product, start, top, method=method, max_iter=max_iter, tol=tol, generator=generator)
            )

    with console.progress("Hessian spectrum", sum(sizes), enabled=steps.get("show_progress", False)) as bar:
        rows = share.rows(
            len(held), width, device, spectrum, known=steps.get("known", ()), save=steps.get("save"),
            done=lambda first, after: bar.advance(sum(sizes[first:after])),
        )  # fmt: skip
    spectra = [_read(row, top) for row in rows]
    flags = [flag for one in spectra for flag in one.converged]
    return HessianSpectrum(tuple(one.values for one in spectra), sum(flags) / len(flags), sum(sizes))


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
    **steps: Unpack[StepOptions],
) -> HessianMax:
    """Return the Hessian eigenvalues of largest magnitude, of the mean loss over all images (Chen et al. 2022, App. F).

    Memory: all images, gradients' graphs of at most `vtk.analysis.probes.second_order.KEEP` bytes beside that of one
    batch, and the iteration's vectors (`vtk.analysis.probes.eigenvalues`).

    Args:
        model: in eval mode during the call.
        batches: of evaluation's or training's transform; held in memory.
        loss: by default plain cross-entropy.
        top: eigenvalues of each group.
        groups: names to parameters; each group's diagonal block is taken alone, such as those of
            `vtk.analysis.parameter_blocks` (Chen et al. 2022, Table 4). Default the whole.
        method: ``lanczos``, or ``power`` as in the paper.
        max_iter: products at most.
        tol: relative tolerance.
        max_images: use only the first ones.
        seed: of the start vector.
        steps: how groups are resumed, saved and shown; processes divide the batches of each product.

    Raises:
        UsageError: an argument is out of range, or the model has no second derivative.
        DataError: there are no images.
    """
    check_keywords("hessian_max", steps, StepOptions)
    held = load_batches(model, batches, max_images)
    criterion = loss or CrossEntropy()
    chosen = {"whole": dict(model.named_parameters())} if groups is None else {k: dict(v) for k, v in groups.items()}
    share, save = steps.get("share", ALONE), steps.get("save")
    rows = share.agree(steps.get("known", ()), 2 * top + 1, held[0][0].device)
    with console.progress("Hessian", len(chosen), unit="groups", enabled=steps.get("show_progress", False)) as bar:
        bar.advance(len(rows))
        for name, parameters in list(chosen.items())[len(rows) :]:
            start, generator = _start(model, parameters, seed)
            with hessian_product(model, criterion, held, parameters, share=share) as product:
                one = top_eigenvalues(
                    product, start, top, method=method, max_iter=max_iter, tol=tol, generator=generator
                )
            rows.append(_row(one))
            bar.advance(1, name)
            if save is not None:
                save(rows)
    spectra = {name: _read(row, top) for name, row in zip(chosen, rows, strict=True)}
    return HessianMax(
        {name: one.values for name, one in spectra.items()},
        {name: all(one.converged) for name, one in spectra.items()},
        sum(one.products for one in spectra.values()),
        sum(len(batch[0]) for batch in held),
    )


def _row(eigenvalues: Eigenvalues) -> list[float]:
    return [*eigenvalues.values, *map(float, eigenvalues.converged), float(eigenvalues.products)]


def _read(row: Sequence[float], top: int) -> Eigenvalues:
    return Eigenvalues(tuple(row[:top]), tuple(flag > 0 for flag in row[top : 2 * top]), int(row[-1]))


def _start(model: nn.Module, parameters: Mapping[str, nn.Parameter], seed: int) -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    size = flat_size(parameters)
    return torch.randn(size, generator=generator).to(next(model.parameters())), generator
