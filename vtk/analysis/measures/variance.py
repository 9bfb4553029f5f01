"""Variance of feature maps over positions, by depth (Park and Kim 2022, Figures 9 and D.1)."""

from dataclasses import dataclass

from torch import Tensor, nn

from vtk.analysis.measures.results import MapsByDepth, UnitMap
from vtk.analysis.probes.batches import Batches
from vtk.analysis.probes.feature_maps import means_over_maps


@dataclass(frozen=True)
class UnitVariance(UnitMap):
    """Variance of the feature map after a unit.

    Attributes:
        variance: mean over images and channels of the variance over positions; None of a single position.
    """

    variance: float | None


@dataclass(frozen=True)
class FeatureVariance(MapsByDepth[UnitVariance]):
    """Variance of a model's feature maps, by depth."""


def feature_variance(model: nn.Module, batches: Batches, *, max_images: int | None = None) -> FeatureVariance:
    """Return the variance over positions after every residual unit, the model in eval mode.

    Unbiased, of every channel of every image on its own, then the mean of these. Class and register tokens are left
    out. It has the square of the features' unit, so that only its steps can be compared between models.

    Memory: the map of one unit and batch at a time.

    Args:
        model: of any kind that `vtk.analysis.probes.residual_units` supports.
        batches: images, labels unused.
        max_images: use only the first ones.

    Raises:
        UsageError: the model has no recognised blocks, or none has a map after it.
        DataError: there are no images.
    """
    means, without_map, images = means_over_maps(model, batches, _variances, max_images)
    rows = []
    for one in means:
        value = float(one.mean) if (one.height, one.width) != (1, 1) else None
        rows.append(UnitVariance(one.unit.name, one.unit.kind, one.height, one.width, value))
    return FeatureVariance(tuple(rows), without_map, images)


def _variances(maps: Tensor) -> Tensor:
    return maps.var(dim=(2, 3)) if maps[0, 0].numel() > 1 else maps[:, :, 0, 0]
