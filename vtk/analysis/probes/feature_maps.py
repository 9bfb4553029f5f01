"""Feature maps: tokens arranged on their grid, without class and register tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vtk.analysis.probes.batches import Batches, eval_mode, stream
from vtk.analysis.probes.residual_units import Unit, residual_units, watch_units
from vtk.analysis.probes.token_positions import prefix_tokens
from vtk.errors import UsageError

_SKEW = 1.5  # maximum ratio of the sides of a cell


class Maps:
    """Arranges the features of a model's units as maps, whatever their layout.

    Args:
        model: a timm model, which gives the number of prefix tokens and the layout of maps.
    """

    def __init__(self, model: nn.Module) -> None:
        self._last = getattr(model, "output_fmt", None) == "NHWC"
        self._prefix = prefix_tokens(model)

    def lay(self, features: Tensor, image: tuple[int, int]) -> Tensor | None:
        """Return tokens (B, N, C), a map (B, H, W, C) or (B, C, H, W) as a map (B, C, H, W).

        Args:
            features: of the model, as `vtk.analysis.probes.residual_units.watch_units` shows them.
            image: height and width in pixels: the grid of tokens has nearly its proportions.

        Returns:
            The map; None if the tokens form no grid, such as class tokens alone.
        """
        if features.ndim == 4:
            return features.movedim(-1, 1) if self._last else features
        count = features.shape[1]
        if count <= self._prefix:
            return None
        grids = {front: grid_of(count - front, image) for front in (self._prefix, 0)}  # CaiT's come in at its end
        known = {front: grid for front, grid in grids.items() if grid is not None}
        if not known:
            return None
        front = min(known, key=lambda at: skew(known[at], image))
        return features[:, front:].transpose(1, 2).unflatten(2, known[front])


@dataclass(frozen=True)
class UnitMean:
    """Mean of a statistic of the map after a unit.

    Attributes:
        unit: of `vtk.analysis.probes.residual_units.residual_units`.
        height: of the map, in positions.
        width: of the map, in positions.
        mean: over images and channels, (...) in fp64.
    """

    unit: Unit
    height: int
    width: int
    mean: Tensor


@torch.no_grad()
def means_over_maps(
    model: nn.Module, batches: Batches, statistic: Callable[[Tensor], Tensor], max_images: int | None = None
) -> tuple[tuple[UnitMean, ...], tuple[str, ...], int]:
    """Return the mean of a statistic of the map after every residual unit, the model in eval mode.

    Memory: the maps of one unit and batch at a time, and what the statistic makes of them.

    Args:
        model: of any kind that `vtk.analysis.probes.residual_units` supports.
        batches: images, labels unused.
        statistic: from maps (B, C, H, W) to (B, C, ...).
        max_images: use only the first ones.

    Returns:
        The units in order, the stem first; names of those left out because their tokens form no grid; number of images.

    Raises:
        UsageError: the model has no recognised blocks, none has a map after it, or images are of different sizes.
        DataError: there are no images.
    """
    units, maps = residual_units(model), Maps(model)
    sums: dict[int, Tensor] = {}
    counts: dict[int, int] = {}
    sizes: dict[int, tuple[int, int]] = {}
    size = (1, 1)

    def see(number: int, features: Tensor) -> None:
        grid = maps.lay(features, size)
        if grid is None:
            return
        sides = (int(grid.shape[2]), int(grid.shape[3]))
        if sizes.setdefault(number, sides) != sides:
            raise UsageError("images have different sizes, and so have their feature maps; give images of one size")
        value = statistic(grid).sum(dim=(0, 1), dtype=torch.float64)
        sums[number] = sums[number] + value if number in sums else value
        counts[number] = counts.get(number, 0) + grid.shape[0] * grid.shape[1]

    images = 0
    with eval_mode(model), watch_units(units, see):
        for batch, _ in stream(model, batches, max_images):
            size = (int(batch.shape[2]), int(batch.shape[3]))
            model(batch)
            images += len(batch)
    if not sums:
        raise UsageError(f"the features of {type(model).__name__} form no maps, so positions cannot be compared")
    means = tuple(UnitMean(units[n], *sizes[n], sums[n] / counts[n]) for n in sorted(sums))
    return means, tuple(unit.name for number, unit in enumerate(units) if number not in sums), images


def grid_of(count: int, image: tuple[int, int]) -> tuple[int, int] | None:
    """Return the rows and columns of ``count`` tokens whose proportions are nearest to the image's; None if none are.

    Every pixel belongs to one patch and patches are about square, so that a count has one fitting grid at most in
    practice: 196 tokens of a square image are 14×14.
    """
    if count < 1:
        return None
    grids = [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]
    best = min(grids, key=lambda grid: skew(grid, image))
    return best if skew(best, image) <= _SKEW else None


def skew(grid: tuple[int, int], image: tuple[int, int]) -> float:
    """Return the longer side of a cell over the shorter one, 1 or more."""
    ratio = grid[0] * image[1] / (grid[1] * image[0])
    return max(ratio, 1 / ratio)
