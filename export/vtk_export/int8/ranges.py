"""Chooses an activation's scale and zero point from what calibration images gave."""

from dataclasses import dataclass

import numpy as np

from vtk_export.int8.recipe import Recipe

_VALUES = 1 << 17
_TAIL = 2048
_STEPS = 48


@dataclass(frozen=True)
class Scale:
    """Rounding of one activation: q = clip(round(x / scale) + zero), x' = (q − zero) · scale.

    Attributes:
        scale: width of a step.
        zero: code of 0.
        signed: int8 with codes −127 to 127, else uint8.
    """

    scale: float
    zero: int
    signed: bool

    @classmethod
    def of(cls, least: float, most: float, *, signed: bool) -> "Scale":
        """Return the rounding whose range just holds ``least``, 0 and ``most``."""
        least, most = min(least, 0.0), max(most, 0.0)
        if signed:
            return cls(float(np.float32(max(-least, most) / 127 or 1.0)), 0, True)
        scale = float(np.float32((most - least) / 255 or 1.0))
        return cls(scale, int(np.clip(np.rint(-least / scale), 0, 255)), False)

    def round(self, values: np.ndarray) -> np.ndarray:
        """Return the numbers that int8 makes of ``values``."""
        low, high = (-128, 127) if self.signed else (0, 255)
        codes = np.clip(np.rint(values / self.scale) + self.zero, low, high)
        rounded: np.ndarray = ((codes - self.zero) * self.scale).astype(np.float32)
        return rounded


def choose_scale(
    rows: np.ndarray, least: np.ndarray, most: np.ndarray, importance: np.ndarray, recipe: Recipe
) -> Scale:
    """Return the rounding of an activation.

    Args:
        rows: (n, C), a sample.
        least, most: (C,), of everything.
        importance: (C,), squared length of what the products multiply each channel by: an error e of a channel is an
            error of e² · importance of their outputs.
        recipe: how.
    """
    low, high = float(least.min()), float(most.max())
    if recipe.ranges == "percentile":
        share = (100 - recipe.percentile) / 100
        low, high = (float(v) for v in np.quantile(rows, (share, 1 - share)))
    if recipe.ranges != "mse":
        return Scale.of(low, high, signed=recipe.symmetric)
    values, weights = _thin(rows, importance)

    def error(a: float, b: float) -> float:
        rounding = Scale.of(a, b, signed=recipe.symmetric)
        return float((weights * (rounding.round(values) - values) ** 2).sum())

    shares = np.linspace(1, 0.1, _STEPS)
    if recipe.symmetric:
        share = min(shares, key=lambda s: error(s * low, s * high))
        return Scale.of(share * low, share * high, signed=True)
    for _ in range(2):  # one end, the other, and both again
        high = min((s * high for s in shares), key=lambda b: error(low, b))
        low = min((s * low for s in shares), key=lambda a: error(a, high))
    return Scale.of(low, high, signed=False)


def _thin(rows: np.ndarray, importance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return values and their weights: all of the tails, every nth of what is between."""
    values = rows.ravel()
    weights = np.broadcast_to(importance, rows.shape).ravel()
    order = np.argsort(values, kind="stable")
    if len(order) <= _VALUES:
        return values, weights
    step = -(-len(order) // _VALUES)
    tails, middle = np.concatenate([order[:_TAIL], order[-_TAIL:]]), order[_TAIL:-_TAIL:step]
    chosen = np.concatenate([tails, middle])
    factor = np.concatenate([np.ones(len(tails)), np.full(len(middle), float(step))])
    return values[chosen], weights[chosen] * factor
