"""How much feature maps vary from position to position, by depth (paper C, Figures 9 and D.1)."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vtk.analysis.batches import Batches, evaluating, stream
from vtk.analysis.figures import Unit as Kind
from vtk.analysis.maps import Maps
from vtk.analysis.units import residual_units, watch_units
from vtk.errors import UsageError


@dataclass(frozen=True)
class UnitVariance:
    """Variance of the feature map behind a unit.

    Attributes:
        name: of the unit, as `vtk.analysis.units.residual_units` has it.
        kind: of the unit.
        height: of the map, in positions.
        width: of the map, in positions.
        variance: mean over images and channels of the variance over positions; None of a single position.
    """

    name: str
    kind: Kind
    height: int
    width: int
    variance: float | None


@dataclass(frozen=True)
class FeatureVariance:
    """Variance of a model's feature maps by depth.

    Attributes:
        units: in order, the stem first.
        without_map: names of units left out, since their tokens are no grid.
        images: over which.
    """

    units: tuple[UnitVariance, ...]
    without_map: tuple[str, ...]
    images: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


@torch.no_grad()
def feature_variance(model: nn.Module, batches: Batches, *, max_images: int | None = None) -> FeatureVariance:
    """Return the variance over positions behind every residual unit, the model in eval mode.

    Unbiased, of every channel of every image on its own, then the mean of these. Class and register tokens are left
    out. It has the square of the features' unit, so that only its steps can be compared between models.

    Memory: the map of one unit and batch at a time.

    Args:
        model: of any kind that `vtk.analysis.units` knows.
        batches: images, labels unused.
        max_images: from the first.

    Raises:
        UsageError: no blocks are known in the model, or none has a map behind it.
        DataError: there are no images.
    """
    units, maps = residual_units(model), Maps(model)
    sums: dict[int, Tensor] = {}
    counts: dict[int, int] = {}
    sizes: dict[int, tuple[int, int]] = {}
    size = (1, 1)

    def see(number: int, features: Tensor) -> None:
        found = maps.lay(features, size)
        if found is None:
            return
        sizes[number] = (int(found.shape[2]), int(found.shape[3]))
        if sizes[number] != (1, 1):
            value = found.var(dim=(2, 3)).sum(dtype=torch.float64)
            sums[number] = sums[number] + value if number in sums else value
            counts[number] = counts.get(number, 0) + found.shape[0] * found.shape[1]

    images = 0
    with evaluating(model), watch_units(units, see):
        for batch, _ in stream(model, batches, max_images):
            size = (int(batch.shape[2]), int(batch.shape[3]))
            model(batch)
            images += len(batch)
    if not sizes:
        raise UsageError(f"the features of {type(model).__name__} are no maps, so they do not vary over positions")
    rows = []
    for number, (height, width) in sorted(sizes.items()):
        value = float(sums[number]) / counts[number] if number in sums else None
        rows.append(UnitVariance(units[number].name, units[number].kind, height, width, value))
    without = tuple(unit.name for number, unit in enumerate(units) if number not in sizes)
    return FeatureVariance(tuple(rows), without, images)
