"""Hessian eigenvalues: spectra of mini-batches (Park and Kim 2022), λ_max over all images (Chen et al. 2022)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from vtk import console
from vtk.analysis.measures.curvature_results import HessianMax, HessianSpectrum
from vtk.analysis.probes.batches import Batches, load_batches
from vtk.analysis.probes.eigenvalues import Eigenvalues, Method, top_eigenvalues
from vtk.analysis.probes.losses import CrossEntropy, Loss
from vtk.analysis.probes.second_order import Product, flat_size, hessian_product
from vtk.analysis.probes.share import ALONE, StepOptions, check_keywords

__all__ = ["HessianMax", "HessianSpectrum", "hessian_max", "hessian_spectrum"]


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
    """Return the Hessian eigenvalues of largest magnitude of each mini-batch (Park and Kim 2022, §2 and App. A).

    Park and Kim (2022) take a tenth of the training images in batches of 16, augmented as in training, the top 5 of
    each, and the loss with its l2 term: give a loader of the training transform, and ``CrossEntropy(weight_decay=…)``.

    Memory: all images, a gradient's graph of one batch, and the iteration's vectors
    (`vtk.analysis.probes.eigenvalues`).

    Args:
        model: in eval mode during the call.
        batches: the mini-batches; held in memory.
        loss: by default plain cross-entropy.
        top: eigenvalues of each mini-batch, beside λ_max.
        method: ``lanczos``, which lists an eigenvalue that occurs several times exactly only once, or ``power`` as in
            the paper, which lists each.
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
    device, wanted = held[0][0].device, _Wanted(1, top)
    share = steps.get("share", ALONE)
    sizes = [len(batch[0]) for batch in held]

    def spectrum(index: int) -> list[float]:
        start, generator = _start(model, dict(model.named_parameters()), seed)
        with hessian_product(model, criterion, [held[index]]) as product:
            return wanted.row(wanted.measure(product, start, generator, method, max_iter, tol))

    with console.progress("Hessian spectrum", sum(sizes), enabled=steps.get("show_progress", False)) as bar:
        rows = share.rows(
            len(held), wanted.width, device, spectrum, known=steps.get("known", ()), save=steps.get("save"),
            done=lambda first, after: bar.advance(sum(sizes[first:after])),
        )  # fmt: skip
    spectra = [wanted.read(row) for row in rows]
    flags = [flag for one in spectra for flag in one.converged[wanted.algebraic :]]
    return HessianSpectrum(
        tuple(one.magnitude for one in spectra),
        sum(flags) / len(flags),
        sum(sizes),
        tuple(one.algebraic[0] for one in spectra),
        tuple(one.converged[0] for one in spectra),
        method,
    )


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
    """Return the largest Hessian eigenvalues of the mean loss over all images: λ_max (Chen et al. 2022, App. F).

    Memory: all images, gradients' graphs of at most `vtk.analysis.probes.second_order.KEEP` bytes beside that of one
    batch, and the iteration's vectors (`vtk.analysis.probes.eigenvalues`).

    Args:
        model: in eval mode during the call.
        batches: of evaluation's or training's transform; held in memory.
        loss: by default plain cross-entropy.
        top: how many of each group, the largest first; the one of largest magnitude comes in addition. With
            ``lanczos`` an eigenvalue that occurs several times exactly is one of them only once.
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
    wanted = _Wanted(top, 1)
    rows = share.agree(steps.get("known", ()), wanted.width, held[0][0].device)
    with console.progress("Hessian", len(chosen), unit="groups", enabled=steps.get("show_progress", False)) as bar:
        bar.advance(len(rows))
        for name, parameters in list(chosen.items())[len(rows) :]:
            start, generator = _start(model, parameters, seed)
            with hessian_product(model, criterion, held, parameters, share=share) as product:
                one = wanted.measure(product, start, generator, method, max_iter, tol)
            rows.append(wanted.row(one))
            bar.advance(1, name)
            if save is not None:
                save(rows)
    spectra = {name: wanted.read(row) for name, row in zip(chosen, rows, strict=True)}
    return HessianMax(
        {name: one.algebraic for name, one in spectra.items()},
        {name: one.magnitude[0] for name, one in spectra.items()},
        {name: all(one.converged) for name, one in spectra.items()},
        sum(one.products for one in spectra.values()),
        sum(len(batch[0]) for batch in held),
        {name: one.converged[0] for name, one in spectra.items()},
        {name: one.converged[top] for name, one in spectra.items()},
        method,
    )


@dataclass(frozen=True)
class _Wanted:
    """How many eigenvalues of each kind, and their rows of numbers, which are saved for a resume."""

    algebraic: int
    magnitude: int

    @property
    def width(self) -> int:
        return 2 * (self.algebraic + self.magnitude) + 1

    def measure(
        self, product: Product, start: Tensor, generator: torch.Generator, method: Method, max_iter: int, tol: float
    ) -> Eigenvalues:
        return top_eigenvalues(
            product, start, algebraic=self.algebraic, magnitude=self.magnitude, method=method, max_iter=max_iter,
            tol=tol, generator=generator,
        )  # fmt: skip

    def row(self, one: Eigenvalues) -> list[float]:
        return [*one.algebraic, *one.magnitude, *map(float, one.converged), float(one.products)]

    def read(self, row: Sequence[float]) -> Eigenvalues:
        first, values = self.algebraic, self.algebraic + self.magnitude
        flags = tuple(flag > 0 for flag in row[values:-1])
        return Eigenvalues(tuple(row[:first]), tuple(row[first:values]), flags, int(row[-1]))


def _start(model: nn.Module, parameters: Mapping[str, nn.Parameter], seed: int) -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    size = flat_size(parameters)
    return torch.randn(size, generator=generator).to(next(model.parameters())), generator
