"""Chooses the recipe of static int8 (ranges, equalisation, products in float) for each runtime; free of torch."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from vtk.errors import UsageError

RANGES = ("minmax", "percentile", "mse")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of static int8 quantisation.

    Weights are symmetric with one scale per output channel, activations have one scale each, measured beforehand: an
    image's outputs do not depend on the other images of a call.

    Attributes:
        ranges: of activations. ``minmax`` takes all that was measured, ``percentile`` cuts both tails, ``mse`` takes
            the range with the smallest squared error of the products that read it.
        percentile: share of the values, in percent, within the range of ``percentile``.
        equalize: exponent of SmoothQuant (Xiao et al., 2023, equation 4) in what is folded into the norm before a
            product; 0 folds nothing.
        symmetric: activations are int8 with zero point 0, as TensorRT takes them; else uint8 with a zero point, which
            has twice as many steps for what is mostly positive.
        attention: quantise the two products of attention as well.
        kept: groups of products that stay in float, by the name of the activation that they read.

    Raises:
        UsageError: a value is not one of these.
    """

    ranges: Literal["minmax", "percentile", "mse"] = "mse"
    percentile: float = 99.999
    equalize: float = 0.5
    symmetric: bool = False
    attention: bool = False
    kept: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.ranges not in RANGES:
            raise UsageError(f"`ranges` is {self.ranges!r}; choose {', '.join(RANGES)}")
        if not 50 < self.percentile <= 100:
            raise UsageError(f"`percentile` is {self.percentile}; give a number above 50, at most 100")
        if not 0 <= self.equalize <= 1:
            raise UsageError(f"`equalize` is {self.equalize}; give a number from 0 to 1")

    def keep(self, names: frozenset[str]) -> "Recipe":
        """Return the recipe with these groups in float."""
        return dataclasses.replace(self, kept=names)


def recipe_for(*, tensorrt: bool) -> Recipe:
    """Return the recipe of a runtime: TensorRT's activations are symmetric, and its attention is one int8 kernel."""
    return Recipe(symmetric=tensorrt, attention=tensorrt)
