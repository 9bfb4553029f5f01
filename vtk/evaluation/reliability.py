"""Calibration error, likelihood and temperature of softmax probabilities (Guo et al., 2017)."""

import math
from dataclasses import dataclass

import numpy as np

from vtk.calibration import MAX_TEMPERATURE, MIN_TEMPERATURE

BINS = 15
"""Bins of equal width of a calibration error."""

_DRAWS = 200
_EDGE = 1.01


@dataclass(frozen=True)
class Bin:
    """Images whose confidence (largest probability) lies in one bin.

    Attributes:
        low: lower edge, not part of the bin.
        high: upper edge, part of it.
        count: images.
        confidence: mean largest probability; None where there are no images.
        accuracy: share whose most likely class is the label; None where there are no images.
    """

    low: float
    high: float
    count: int
    confidence: float | None
    accuracy: float | None


def confidence_and_nll(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, float]:
    """Return each image's largest probability, fp64 (images,), and the mean −ln of the label's, nats.

    Args:
        logits: (images, classes), fp64.
        labels: (images,), class indices.
    """
    shifted = logits - logits.max(axis=1, keepdims=True)
    totals = np.log(np.exp(shifted).sum(axis=1))
    return np.exp(-totals), float((totals - shifted[np.arange(len(labels)), labels]).mean())


def reliability_bins(confidence: np.ndarray, right: np.ndarray, bins: int = BINS) -> tuple[Bin, ...]:
    """Return the images by their confidence, in bins of equal width from 0 to 1."""
    place = _places(confidence, bins)
    counts = np.bincount(place, minlength=bins)
    sums = [np.bincount(place, weights=values, minlength=bins) for values in (confidence, right)]
    means = [[float(s / n) if n else None for s, n in zip(total, counts, strict=True)] for total in sums]
    return tuple(Bin(i / bins, (i + 1) / bins, int(n), means[0][i], means[1][i]) for i, n in enumerate(counts))


def calibration_error(rows: tuple[Bin, ...]) -> float:
    """Return the expected calibration error: Σ (count / images)·|accuracy − confidence| over bins."""
    count = sum(row.count for row in rows)
    return sum(
        row.count / count * abs(row.accuracy - row.confidence)
        for row in rows
        if row.accuracy is not None and row.confidence is not None
    )


def error_by_chance(confidence: np.ndarray, bins: int = BINS, seed: int = 0) -> float:
    """Return the 95th percentile of the error if every image is right with the probability that the model gives."""
    draw = np.random.default_rng(seed)
    place = _places(confidence, bins)
    errors = []
    for _ in range(_DRAWS):
        gap = (draw.random(len(confidence)) < confidence) - confidence
        errors.append(np.abs(np.bincount(place, weights=gap, minlength=bins)).sum() / len(confidence))
    return float(np.percentile(errors, 95))


def fit_temperature(logits: np.ndarray, labels: np.ndarray, *, prior: float = 0.0) -> float | None:
    """Return T > 0 that minimises the NLL, which is convex in 1/T; None at an end of the range: no minimum.

    Args:
        logits: (images, classes), fp64.
        labels: (images,), class indices.
        prior: nats that a temperature of e costs, once for all images: few of them do not decide alone.
    """
    from scipy.optimize import minimize_scalar

    minimum = minimize_scalar(
        lambda t: confidence_and_nll(logits / math.exp(t), labels)[1] + prior * t * t / len(labels),
        bounds=(math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)),
        method="bounded",
        options={"xatol": 1e-6},
    )
    temperature = math.exp(float(minimum.x))
    return temperature if MIN_TEMPERATURE * _EDGE < temperature < MAX_TEMPERATURE / _EDGE else None


def _places(confidence: np.ndarray, bins: int) -> np.ndarray:
    # edges belong to the bin below them (Guo et al.); a rounded 1 + ε to the last
    return np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
