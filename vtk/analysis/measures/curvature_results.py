"""Hessian eigenvalues as results: spectra of mini-batches (Park and Kim 2022), λ_max of groups (Chen et al. 2022)."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from vtk.analysis.measures.results import MeasureResult


@dataclass(frozen=True)
class HessianSpectrum:
    """The eigenvalues of largest magnitude of each mini-batch's Hessian, and its λ_max.

    Attributes:
        values: of each mini-batch, largest magnitude first, with signs; with ``lanczos`` an eigenvalue that occurs
            several times exactly is there once.
        converged: share of them that converged.
        images: number of images, over all mini-batches.
        lambda_max: of each mini-batch, the largest eigenvalue; not among ``values`` where all those are negative.
        lambda_max_converged: whether it did; a lower bound where not.
        method: ``lanczos`` or ``power``; empty where it is not known.
    """

    values: tuple[tuple[float, ...], ...]
    converged: float
    images: int
    lambda_max: tuple[float, ...] = ()
    lambda_max_converged: tuple[bool, ...] = ()
    method: str = ""

    @property
    def negative_share(self) -> float:
        """NEP: share of negative values (Park and Kim 2022)."""
        everything = [v for batch in self.values for v in batch]
        return sum(v < 0 for v in everything) / len(everything)

    @property
    def positive_mean(self) -> float:
        """APE: mean of the positive values (Park and Kim 2022); NaN without any."""
        positive = [v for batch in self.values for v in batch if v > 0]
        return sum(positive) / len(positive) if positive else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "negative_share": self.negative_share, "positive_mean": self.positive_mean}


@dataclass(frozen=True)
class HessianMax(MeasureResult):
    """The largest eigenvalues of one operator, over all images: λ_max, and the one of largest magnitude.

    They differ where the loss bends downwards more than upwards: then λ_max is the largest curvature upwards, which a
    step of gradient descent has to respect, and the other is negative. One that has not converged is v·H·v of some unit
    vector v: a lower bound of λ_max, and in magnitude of the other.

    Attributes:
        values: of each group of parameters, the largest eigenvalues, in descending order; ``whole`` is the whole
            Hessian.
        lambda_largest_magnitude: of each group, the eigenvalue of largest magnitude, with its sign.
        converged: of each group, whether all converged.
        products: Hessian-vector products, all groups together.
        images: number of images.
        lambda_max_converged: of each group, whether λ_max did; a lower bound where not.
        magnitude_converged: of each group, whether the eigenvalue of largest magnitude did.
        method: ``lanczos`` or ``power``; empty where it is not known.
    """

    values: dict[str, tuple[float, ...]]
    lambda_largest_magnitude: dict[str, float]
    converged: dict[str, bool]
    products: int
    images: int
    lambda_max_converged: dict[str, bool] = field(default_factory=dict)
    magnitude_converged: dict[str, bool] = field(default_factory=dict)
    method: str = ""

    @property
    def lambda_max(self) -> dict[str, float]:
        """λ_max of each group: its largest eigenvalue."""
        return {group: values[0] for group, values in self.values.items()}

    @property
    def value(self) -> float:
        """λ_max of the whole Hessian, else of the only group."""
        return self.lambda_max[self._main]

    @property
    def magnitude(self) -> float:
        """The eigenvalue of largest magnitude of the whole Hessian, else of the only group, with its sign."""
        return self.lambda_largest_magnitude[self._main]

    @property
    def _main(self) -> str:
        return "whole" if "whole" in self.values else next(iter(self.values))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"lambda_max": self.lambda_max, **asdict(self)}
