"""Measures whether an image's outputs depend on the other images of its call, NaN and infinite ones among them.

A server puts images of several clients into one call. Each image is run alone, and then with neighbours of several
kinds, some of which only a faulty client would send.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vtk import console
from vtk.card import InputSpec
from vtk.data.loading.normalization import to_input
from vtk.errors import VerificationError
from vtk_export.gate.limits import RELATIVE_BOUND, Limits

Run = Callable[[Tensor], Mapping[str, Tensor]]
"""Maps images (B, C, H, W) to outputs (B, n) on the CPU."""

HONEST = 3
"""Images whose outputs are compared."""

_LARGE = 1e4


@dataclass(frozen=True)
class Dependence:
    """Outputs of images in shared calls, compared with their outputs alone.

    Attributes:
        images: number of images compared.
        batch: number of images in a shared call.
        error: largest absolute difference; infinite if a neighbour turned an output into NaN.
        relative: ``error`` as a fraction of the largest absolute output.
        changed: number of images whose top-1 class changed in some call; 0 of features.
        worst: neighbours with the largest difference.
        unmarked: outputs that are numbers for an image with NaN or infinite pixels, where NaN is expected.
    """

    images: int
    batch: int
    error: float
    relative: float
    changed: int
    worst: str
    unmarked: tuple[str, ...] = ()

    def describe(self, bound: float) -> str:
        """Return one line for people; up to ``bound`` a difference is rounding."""
        if not self.images:
            return "one image a call: no image has neighbours; a NaN or infinite image gives NaN"
        among = f"among others in calls of {self.batch} (black, very large, infinite and NaN ones too)"
        if self.relative <= bound:
            same = f"equal within {self.relative:.1e} of the largest" if self.relative else "equal"
            return f"an image alone and {among}: outputs {same}; a NaN or infinite image gives NaN in its own row"
        return (
            f"an image's outputs depend on its neighbours: alone and {among} they differ by up to {self.error:.2g} "
            f"({console.percent(self.relative, 1)} of the largest; {self.worst}), the class in {self.changed} of "
            f"{self.images}; run one image per call, or use --int8 static"
        )


def measure(run: Run, images: Tensor, *, static_batch: int | None, black: Tensor, names: Sequence[str]) -> Dependence:
    """Run images alone and with neighbours, and compare.

    Args:
        run: the file, graph optimisations on.
        images: (N, C, H, W) fp32, of which the first `HONEST` are taken.
        static_batch: fixed batch size, None for any; an image alone is then a call of its copies.
        black: (C, H, W), as the model takes it.
        names: of the outputs; the class is the largest of the first.
    """
    honest = images[: HONEST if static_batch is None else min(HONEST, static_batch - 1)]

    def call(rows: Tensor, filling: Tensor) -> dict[str, Tensor]:
        spare = 0 if static_batch is None else static_batch - len(rows)
        found = run(torch.cat((rows, filling[None].expand(spare, *filling.shape))) if spare else rows)
        return {name: found[name].float() for name in names}

    alone = [call(image[None], image) for image in honest]
    wanted = {name: torch.stack([found[name][0] for found in alone]) for name in names} if alone else {}
    error, relative, worst, unmarked = 0.0, 0.0, "rounding", set[str]()
    changed = torch.zeros(len(honest), dtype=torch.bool)
    size = static_batch or len(honest) + 1
    for kind, neighbour, finite in _neighbours(images, black):
        found = call(torch.cat((honest[:1], neighbour[None], honest[1:])), neighbour)
        at = min(1, len(honest))
        if not finite:
            unmarked |= {name for name in names if not bool(found[name][at].isnan().all())}
        if not len(honest):
            continue
        rows = [row for row in range(len(honest) + 1) if row != at]
        for name in names:
            largest = max(wanted[name].abs().max().item(), 1e-30)
            # of NaN and a number max() keeps either
            far = (found[name][rows] - wanted[name]).abs().nan_to_num(nan=math.inf).max().item()
            if far / largest > relative:
                error, relative, worst = far, far / largest, f"{kind} neighbours"
        if names[0] != "features":
            changed |= _other_class(found[names[0]][rows], wanted[names[0]])
    return Dependence(len(honest), size, error, relative, int(changed.sum()), worst, tuple(sorted(unmarked)))


def black_image(spec: InputSpec) -> Tensor:
    """Return a black image (C, H, W) as the model takes it."""
    return to_input(torch.zeros(spec.in_chans, *spec.size), spec)


def rounding(limits: Limits, *, dynamic: bool = False) -> float:
    """Return the largest `Dependence.relative` that counts as rounding; ranges computed at every call allow less."""
    return RELATIVE_BOUND if dynamic or limits.batch is None else limits.batch


def check_dependence(found: Dependence, bound: float, *, dynamic: bool = False) -> None:
    """Check the measured dependence against the bound.

    Args:
        found: what was measured.
        bound: of what is rounding.
        dynamic: whether ranges are found at every call, so that an image's outputs may depend on its neighbours.

    Raises:
        VerificationError: they depend on them, or a NaN image is answered with numbers.
    """
    if math.isinf(found.error) or not (dynamic or found.relative <= bound):
        by = "become NaN" if math.isinf(found.error) else f"change by {console.percent(found.relative, 2)}"
        raise VerificationError(
            f"{found.worst} of an image in the same call make its outputs {by}, so clients of a server would affect "
            "each other's results; nothing was kept, please report this"
        )
    if found.unmarked:
        raise VerificationError(
            f"`{found.unmarked[0]}` of an image with NaN or infinite pixels are numbers, expected NaN; nothing was "
            "kept, please report this"
        )


def _neighbours(images: Tensor, black: Tensor) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield kind, image (C, H, W) and whether it is finite."""
    other = images[-1]
    yield "other", other, True
    yield "black", black, True
    yield "very large", _LARGE * other, True
    for value in (math.nan, math.inf):
        whole = torch.full_like(other, value)
        spot = other.clone()
        spot[-1, spot.shape[1] // 2, spot.shape[2] // 3] = value
        kind = "NaN" if math.isnan(value) else "infinite"
        yield kind, whole, False
        yield kind, spot, False


def _other_class(found: Tensor, wanted: Tensor) -> Tensor:
    """Return where the top-1 class differs, except for classes that are equal up to rounding."""
    other = found.argmax(1) != wanted.argmax(1)
    if wanted.shape[1] < 2:
        return torch.zeros_like(other)
    top = wanted.topk(2).values
    return other & ((top[:, 0] - top[:, 1]) > RELATIVE_BOUND * wanted.abs().max())
