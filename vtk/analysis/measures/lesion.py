"""Accuracy of a model without one of its units (Park and Kim 2022, Figure 10b; Bhojanapalli et al. 2021)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vtk import console
from vtk.analysis.figures import Unit as Kind
from vtk.analysis.measures.accuracy import logits_of
from vtk.analysis.measures.results import MeasureResult
from vtk.analysis.probes.batches import Batches, eval_mode, stream
from vtk.analysis.probes.convolutions import single_convolutions
from vtk.analysis.probes.residual_units import Unit, residual_units, without_unit
from vtk.analysis.probes.share import ALONE, Rows, Save, Share
from vtk.errors import UsageError

_COUNTS = 3  # of each unit and batch: images lost, won, and classified otherwise


@dataclass(frozen=True)
class UnitLesion:
    """A model without one unit.

    Attributes:
        name: of the unit, as `vtk.analysis.probes.residual_units.residual_units` has it.
        kind: of the unit.
        accuracy: without it, as a fraction; None of a unit that cannot be removed: the stem, a subsampling layer.
        delta: accuracy without it minus accuracy with it.
        error: standard error of ``delta``: which images were chosen moves it by about so much.
        changed: share of the images that get another class without it, right or wrong.
    """

    name: str
    kind: Kind
    accuracy: float | None
    delta: float | None
    error: float | None
    changed: float | None


@dataclass(frozen=True)
class Lesions(MeasureResult):
    """Accuracy of a model without each of its units.

    Attributes:
        accuracy: of the whole model, as a fraction.
        units: in order, the stem first.
        classes: number of outputs; chance is one over it.
        images: number of images.
        convolutions: whether single convolutions were removed in place of blocks of them; a model without blocks of
            them has none.
    """

    accuracy: float
    units: tuple[UnitLesion, ...]
    classes: int
    images: int
    convolutions: bool = False


@torch.no_grad()
def lesion_study(
    model: nn.Module,
    batches: Batches,
    *,
    max_images: int | None = None,
    convolutions: bool = False,
    share: Share = ALONE,
    kept: Rows = (),
    save: Save | None = None,
    title: str = "",
) -> Lesions:
    """Return a model's accuracy without each of its residual units, the model in eval mode.

    Removed is what a unit adds: its branch gives 0 and the skip passes on what came
    (`vtk.analysis.probes.residual_units.without_unit`). All units see the same images. One forward pass for each unit
    and batch, and one more; nothing of the model is changed.

    Memory: one batch.

    Args:
        model: classifier of a kind that `vtk.analysis.probes.residual_units` knows, (B, C, H, W) to (B, classes).
        batches: images and labels (B,).
        max_images: use only the first ones.
        convolutions: remove single spatial convolutions in place of whole blocks of them
            (`vtk.analysis.probes.convolutions.single_convolutions`).
        share: this process's part, if several processes measure together.
        kept: what ``save`` was given last by an earlier run with the same arguments: those batches are not done again.
        save: gets the counts so far after every batch, or every round of batches where processes share them.
        title: of the progress bar; empty for no bar.

    Raises:
        UsageError: no unit of the model can be removed; or labels are not one number per image, below the number
            of the model's outputs.
        DataError: there are no images.
    """
    units = single_convolutions(model) if convolutions else residual_units(model)
    device = next(model.parameters()).device
    removable = [number for number, unit in enumerate(units) if unit.outlets]
    if not removable:
        raise UsageError(f"{type(model).__name__} has no unit that a skip leads past, so none can be removed")
    width = 3 + _COUNTS * len(removable)  # images, right ones, classes
    rows = share.agree(kept, width, device)
    done, own = len(rows), None
    number = -1
    with eval_mode(model), console.progress(title, max_images or 0, enabled=bool(title)) as bar:
        for number, (images, labels) in enumerate(stream(model, batches, max_images)):
            if number >= done and number % share.world == share.rank:
                own = _row(model, images, labels, [units[i] for i in removable])
            if number >= done and number % share.world == share.world - 1:
                rows += share.gather(own, width, device)
                own = None
                if save is not None:
                    save(rows)
            bar.advance(len(images))
    if number >= len(rows):  # a last round of fewer batches than processes
        rows += share.gather(own, width, device)[: number + 1 - len(rows)]
    return _result(rows, units, removable, any(unit.passes for unit in units if unit.outlets))


def _row(model: nn.Module, images: Tensor, labels: Tensor, units: Sequence[Unit]) -> list[float]:
    """Return the counts of a batch: images, right ones, outputs, then of each unit what its removal changes."""
    if labels.ndim != 1:
        raise UsageError(f"labels are {tuple(labels.shape)}; accuracy needs one class number for each image, (B,)")
    logits = logits_of(model, images, labels)
    classes = logits.argmax(dim=1)
    right = classes == labels
    counts = []
    for unit in units:
        with without_unit(unit):
            without = model(images).argmax(dim=1)
        hit = without == labels
        counts += [(right & ~hit).sum(), (hit & ~right).sum(), (without != classes).sum()]
    numbers: list[float] = torch.stack([right.sum(), *counts]).double().tolist()
    return [float(len(images)), numbers[0], float(logits.shape[1]), *numbers[1:]]


def _result(rows: Rows, units: Sequence[Unit], removable: Sequence[int], convolutions: bool) -> Lesions:
    columns = list(zip(*rows, strict=True))
    images, right, *sums = (math.fsum(column) for column in columns)
    counts = sums[1:]
    lesions = []
    for number, unit in enumerate(units):
        if number not in removable:
            lesions.append(UnitLesion(unit.name, unit.kind, None, None, None, None))
            continue
        at = _COUNTS * removable.index(number)
        lost, won, changed = counts[at : at + _COUNTS]
        delta = (won - lost) / images
        error = math.sqrt(max((won + lost) / images - delta**2, 0.0) / images)
        lesions.append(UnitLesion(unit.name, unit.kind, right / images + delta, delta, error, changed / images))
    return Lesions(right / images, tuple(lesions), int(columns[2][0]), int(images), convolutions)
