"""Base classes of the results of measures: plain JSON values, layers in order, feature maps by depth."""

from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from vtk.analysis.figures import Unit as Kind


@dataclass(frozen=True)
class MeasureResult:
    """The result of a measure: a dataclass whose values are plain."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


Layer = TypeVar("Layer")


@dataclass(frozen=True)
class LayerResults(MeasureResult, Generic[Layer]):
    """A measure of every layer of a kind.

    Attributes:
        layers: in the order in which they run.
        images: number of images.
    """

    layers: tuple[Layer, ...]
    images: int


@dataclass(frozen=True)
class UnitMap:
    """The feature map after a residual unit; measures add their values.

    Attributes:
        name: of the unit, as `vtk.analysis.probes.residual_units.residual_units` gives it.
        kind: of the unit.
        height: of the map, in positions.
        width: of the map, in positions.
    """

    name: str
    kind: Kind
    height: int
    width: int


Unit = TypeVar("Unit", bound=UnitMap)


@dataclass(frozen=True)
class MapsByDepth(MeasureResult, Generic[Unit]):
    """A measure of the feature maps of a model, by depth.

    Attributes:
        units: in order, the stem first.
        without_map: names of the units left out because their tokens form no grid.
        images: number of images.
    """

    units: tuple[Unit, ...]
    without_map: tuple[str, ...]
    images: int
