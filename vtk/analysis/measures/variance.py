"""How much feature maps vary from position to position, by depth (paper C, Figures 9 and D.1)."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from vtk.analysis.figures import Unit as Kind
from vtk.analysis.probes.batches import Batches
from vtk.analysis.probes.feature_maps import means_over_maps


@dataclass(frozen=True)
class UnitVariance:
    """Variance of the feature map behind a unit.

    Attributes:
        name: of the unit, as `vtk.analysis.probes.units.residual_units` has it.
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


def feature_variance(model: nn.Module, batches: Batches, *, max_images: int | None = None) -> FeatureVariance:
    """Return the variance over positions behind every residual unit, the model in eval mode.

    Unbiased, of every channel of every image on its own, then the mean of these. Class and register tokens are left
    out. It has the square of the features' unit, so that only its steps can be compared between models.

    Memory: the map of one unit and batch at a time.

    Args:
        model: of any kind that `vtk.analysis.probes.units` knows.
        batches: images, labels unused.
        max_images: from the first.

    Raises:
        UsageError: no blocks are known in the model, or none has a map behind it.
        DataError: there are no images.
    """
    found, without_map, images = means_over_maps(model, batches, _variances, max_images)
    rows = []
    for one in found:
        value = float(one.mean) if (one.height, one.width) != (1, 1) else None
        rows.append(UnitVariance(one.unit.name, one.unit.kind, one.height, one.width, value))
    return FeatureVariance(tuple(rows), without_map, images)


def _variances(maps: Tensor) -> Tensor:
    return maps.var(dim=(2, 3)) if maps[0, 0].numel() > 1 else maps[:, :, 0, 0]
