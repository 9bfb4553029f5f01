"""Calibration of a classifier's probabilities (Park and Kim 2022, Figure F.1a; Guo et al. 2017)."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from torch import nn

from vtk.analysis.measures.results import MeasureResult
from vtk.analysis.probes.batches import Batches, eval_mode, stream
from vtk.errors import DataError, UsageError

_DRAWS = 200
_TEMPERATURES = (1e-2, 1e2)
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


@dataclass(frozen=True)
class Calibration(MeasureResult):
    """Calibration of a model.

    Attributes:
        bins: of equal width, from 0 to 1.
        ece: expected calibration error, Σ (count / images)·|accuracy − confidence| over bins; 0 to 1.
        ece_by_chance: 95th percentile of the ``ece`` of a perfectly calibrated model with the same confidences, from
            random labels. An ``ece`` below it is no evidence of miscalibration.
        accuracy: share of images whose most likely class is the label.
        confidence: mean largest probability; above the accuracy, the model is over-confident.
        nll: mean −ln of the label's probability, nats.
        temperature: divisor of all logits that minimises the NLL on these same images; None if there is no minimum,
            because every image is right or the logits do not depend on the labels.
        fitted_ece: the ``ece`` with it; too optimistic, because it was fitted on the same images.
        fitted_nll: the ``nll`` with it.
        images: number of images.
    """

    bins: tuple[Bin, ...]
    ece: float
    ece_by_chance: float
    accuracy: float
    confidence: float
    nll: float
    temperature: float | None
    fitted_ece: float | None
    fitted_nll: float | None
    images: int


@torch.no_grad()
def model_calibration(
    model: nn.Module, batches: Batches, *, bins: int = 15, max_images: int | None = None, seed: int = 0
) -> Calibration:
    """Return how well a model's softmax probabilities match its accuracy, the model in eval mode.

    Memory: 8 bytes for each image and class.

    Args:
        model: gives logits (B, classes), at least two.
        batches: images and labels (B,) int64.
        bins: number of bins of equal width.
        max_images: use only the first ones.
        seed: of the draws after ``ece_by_chance``.

    Raises:
        UsageError: ``bins`` is below 1, the model gives one number, or labels are not one for each image.
        DataError: there are no images, a label is not a class of the model, or a logit is not finite.
    """
    if bins < 1:
        raise UsageError(f"`bins` is {bins}; give 1 or more")
    parts, truth = [], []
    with eval_mode(model):
        for images, labels in stream(model, batches, max_images):
            logits = model(images)
            if labels.ndim != 1:
                raise UsageError(f"calibration needs one label per image; these labels are {tuple(labels.shape)}")
            if logits.ndim != 2 or logits.shape[1] < 2:
                raise UsageError(f"calibration needs logits (B, classes); the model gives {tuple(logits.shape)}")
            parts.append(logits.double().cpu().numpy())
            truth.append(labels.cpu().numpy())
    return of_logits(np.concatenate(parts), np.concatenate(truth), bins=bins, seed=seed)


def of_logits(logits: np.ndarray, labels: np.ndarray, *, bins: int = 15, seed: int = 0) -> Calibration:
    """Return the calibration of fp64 logits (images, classes) with labels (images,); as `model_calibration`."""
    count, classes = logits.shape
    if labels.min() < 0 or labels.max() >= classes:
        raise DataError(f"labels reach from {labels.min()} to {labels.max()}; the model has {classes} classes")
    if not np.isfinite(logits).all():
        raise DataError("the model's logits are not all finite; its probabilities cannot be judged")
    right = logits.argmax(axis=1) == labels
    confidence, nll = _softmax(logits, labels)
    rows = _bins(confidence, right, bins)
    temperature = _temperature(logits, labels)
    fitted = None if temperature is None else _softmax(logits / temperature, labels)
    return Calibration(
        bins=rows,
        ece=_ece(rows, count),
        ece_by_chance=_by_chance(confidence, bins, seed),
        accuracy=float(right.mean()),
        confidence=float(confidence.mean()),
        nll=nll,
        temperature=temperature,
        fitted_ece=None if fitted is None else _ece(_bins(fitted[0], right, bins), count),
        fitted_nll=None if fitted is None else fitted[1],
        images=count,
    )


def _softmax(logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, float]:
    """Return each image's largest probability and the mean NLL."""
    logs = log_softmax(logits, axis=1)
    return np.exp(logs.max(axis=1)), float(-logs[np.arange(len(labels)), labels].mean())


def _places(confidence: np.ndarray, bins: int) -> np.ndarray:
    # edges belong to the bin below them (Guo et al.); a rounded 1 + ε to the last
    return np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)


def _bins(confidence: np.ndarray, right: np.ndarray, bins: int) -> tuple[Bin, ...]:
    place = _places(confidence, bins)
    counts = np.bincount(place, minlength=bins)
    sums = [np.bincount(place, weights=values, minlength=bins) for values in (confidence, right)]
    means = [[float(s / n) if n else None for s, n in zip(total, counts, strict=True)] for total in sums]
    return tuple(Bin(i / bins, (i + 1) / bins, int(n), means[0][i], means[1][i]) for i, n in enumerate(counts))


def _ece(rows: tuple[Bin, ...], count: int) -> float:
    return sum(
        row.count / count * abs(row.accuracy - row.confidence)
        for row in rows
        if row.accuracy is not None and row.confidence is not None
    )


def _by_chance(confidence: np.ndarray, bins: int, seed: int) -> float:
    """Return the 95th percentile of the ECE if every image is right with the probability that the model gives."""
    draw = np.random.default_rng(seed)
    place = _places(confidence, bins)
    errors = []
    for _ in range(_DRAWS):
        gap = (draw.random(len(confidence)) < confidence) - confidence
        errors.append(np.abs(np.bincount(place, weights=gap, minlength=bins)).sum() / len(confidence))
    return float(np.percentile(errors, 95))


def _temperature(logits: np.ndarray, labels: np.ndarray) -> float | None:
    """Return T > 0 that minimises the NLL, which is convex in 1/T; None at an end of the range: no minimum."""
    low, high = _TEMPERATURES
    minimum = minimize_scalar(
        lambda t: _softmax(logits / math.exp(t), labels)[1],
        bounds=(math.log(low), math.log(high)),
        method="bounded",
        options={"xatol": 1e-6},
    )
    temperature = math.exp(float(minimum.x))
    return temperature if low * _EDGE < temperature < high / _EDGE else None
