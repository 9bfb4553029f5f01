"""Loss on a plane through a model's weights (Park and Kim 2022, Figure 1a; Chen et al. 2022, Figure 1)."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Unpack

import torch
from torch import nn

from vtk import console
from vtk.analysis.probes.batches import Batches, eval_mode, load_batches
from vtk.analysis.probes.directions import Direction, DirectionMode, random_directions
from vtk.analysis.probes.losses import CrossEntropy, Loss, data_loss, l2_term
from vtk.analysis.probes.share import ALONE, StepOptions, check_keywords
from vtk.errors import UsageError


@dataclass(frozen=True)
class Landscape:
    """Losses at w + a·d₁ + b·d₂.

    Attributes:
        steps: values of a and of b, from −span to span; the model is at 0, in the middle.
        losses: mean loss over the images with its l2 term, ``losses[i][j]`` at a = steps[i], b = steps[j]; NaN or
            infinite where the loss has no value.
        l2: the l2 term alone, at the same points; zeros without weight decay.
        directions: how d₁ and d₂ are scaled.
        images: number of images.
    """

    steps: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    l2: tuple[tuple[float, ...], ...]
    directions: str
    images: int

    @property
    def centre(self) -> float:
        """The model's own loss."""
        middle = len(self.steps) // 2
        return self.losses[middle][middle]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "centre": self.centre}


def loss_landscape(
    model: nn.Module,
    batches: Batches,
    *,
    grid: int = 11,
    span: float = 1.0,
    directions: DirectionMode = "filter",
    vectors: bool = False,
    loss: Loss | None = None,
    max_images: int | None = None,
    seed: int = 0,
    **options: Unpack[StepOptions],
) -> Landscape:
    """Return the loss on a grid of the plane that two random directions span, the model in eval mode.

    Park and Kim (2022) look at 21 × 21 points, at the training images augmented and mixed, with an l2 term; Chen et al.
    (2022) at 2,500 points, a tenth of the training images and plain cross-entropy. With ``directions="reference"`` the
    l2 term is what Park and Kim's code adds, weight_decay·Σ‖p‖ over the parameters, not squared; otherwise
    ½·weight_decay·‖w‖².

    The weights are changed in place and restored from a copy, bit for bit, also if the measurement is interrupted.
    Buffers do not move: BatchNorm normalises with the statistics that it has. Memory: all images, and three more copies
    of the weights.

    Args:
        model: unchanged on return.
        batches: held in memory.
        grid: points along each axis, an odd number from 3.
        span: of each axis, in norms of the weights.
        directions: ``filter`` or ``reference``, see `vtk.analysis.probes.directions.random_directions`.
        vectors: tensors of one axis move too.
        loss: by default plain cross-entropy.
        max_images: use only the first ones.
        seed: of the directions.
        options: how points are resumed, saved, divided between processes and shown.

    Raises:
        UsageError: an argument is out of range, or nothing in the model moves.
        DataError: there are no images.
    """
    check_keywords("loss_landscape", options, StepOptions)
    if grid < 3 or grid % 2 == 0:
        raise UsageError(f"`grid` is {grid}; give an odd number, 3 or more: the model is in the middle")
    if not (math.isfinite(span) and span > 0):
        raise UsageError(f"`span` is {span}; give a number above 0")
    held = load_batches(model, batches, max_images)
    criterion = loss or CrossEntropy()
    device = held[0][0].device
    half = grid // 2
    steps = [span * (i - half) / half for i in range(grid)]
    points = [(a, b) for a in steps for b in steps]
    plane = _Plane(model, random_directions(model, mode=directions, vectors=vectors, seed=seed))

    def point(index: int) -> list[float]:
        plane.move(*points[index])
        return [data_loss(criterion, model, held), _penalty(model, criterion.weight_decay, directions)]

    with (
        eval_mode(model),
        plane,
        console.progress("landscape", len(points), unit="points", enabled=options.get("show_progress", False)) as bar,
    ):
        rows = options.get("share", ALONE).rows(
            len(points),
            2,
            device,
            point,
            known=options.get("known", ()),
            save=options.get("save"),
            done=lambda first, after: bar.advance(after - first),
        )
    lines = [rows[i : i + grid] for i in range(0, len(rows), grid)]
    return Landscape(
        tuple(steps),
        tuple(tuple(data + l2 for data, l2 in line) for line in lines),
        tuple(tuple(l2 for _, l2 in line) for line in lines),
        directions,
        sum(len(batch[0]) for batch in held),
    )


class _Plane:
    """Moves a model's weights inside of a context, and puts them back at its end."""

    def __init__(self, model: nn.Module, directions: list[Direction]) -> None:
        named = dict(model.named_parameters())
        self.moving = [(named[n], named[n].detach().clone(), *(d[n] for d in directions)) for n in directions[0]]

    def __enter__(self) -> None: ...

    @torch.no_grad()
    def move(self, a: float, b: float) -> None:
        """Go to w + a·d₁ + b·d₂."""
        for p, own, first, second in self.moving:
            p.copy_(own).add_(first, alpha=a).add_(second, alpha=b)

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for p, own, *_rest in self.moving:
            p.copy_(own)


@torch.no_grad()
def _penalty(model: nn.Module, weight_decay: float, directions: DirectionMode) -> float:
    if not weight_decay:
        return 0.0
    if directions == "reference":
        return weight_decay * sum(float(p.double().norm()) for p in model.parameters())
    return l2_term(model, weight_decay)
