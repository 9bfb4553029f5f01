"""Calibration of a classifier's probabilities (Park and Kim 2022, Figure F.1a; Guo et al. 2017)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from vtk.analysis.measures.results import MeasureResult
from vtk.analysis.probes.batches import Batches, eval_mode, stream
from vtk.errors import DataError, NoResultError, UsageError
from vtk.evaluation.reliability import (
    BINS,
    Bin,
    calibration_error,
    confidence_and_nll,
    error_by_chance,
    fit_temperature,
    reliability_bins,
)


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
    model: nn.Module, batches: Batches, *, bins: int = BINS, max_images: int | None = None, seed: int = 0
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
        DataError: there are no images, or a label is not a class of the model.
        NoResultError: a logit is not finite.
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


def of_logits(logits: np.ndarray, labels: np.ndarray, *, bins: int = BINS, seed: int = 0) -> Calibration:
    """Return the calibration of fp64 logits (images, classes) with labels (images,); as `model_calibration`."""
    count, classes = logits.shape
    if labels.min() < 0 or labels.max() >= classes:
        raise DataError(f"labels reach from {labels.min()} to {labels.max()}; the model has {classes} classes")
    if not np.isfinite(logits).all():
        raise NoResultError("the model's logits are not all finite; its probabilities cannot be judged")
    right = logits.argmax(axis=1) == labels
    confidence, nll = confidence_and_nll(logits, labels)
    rows = reliability_bins(confidence, right, bins)
    temperature = fit_temperature(logits, labels)
    fitted = None if temperature is None else confidence_and_nll(logits / temperature, labels)
    return Calibration(
        bins=rows,
        ece=calibration_error(rows),
        ece_by_chance=error_by_chance(confidence, bins, seed),
        accuracy=float(right.mean()),
        confidence=float(confidence.mean()),
        nll=nll,
        temperature=temperature,
        fitted_ece=None if fitted is None else calibration_error(reliability_bins(fitted[0], right, bins)),
        fitted_nll=None if fitted is None else fitted[1],
        images=count,
    )
