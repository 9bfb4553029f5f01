"""Accuracy under Gaussian noise, shot noise and blur of increasing strength (Hyeon-Woo et al. 2023, Table 9)."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Unpack

from torch import Tensor, nn

from vtk.analysis.measures.accuracy import AccuracyCurves, AccuracyOptions, Change, Curve, Draws, accuracies
from vtk.analysis.probes.batches import Batches
from vtk.analysis.probes.share import check_keywords
from vtk.errors import UsageError

DEVIATIONS = (5.0, 10.0, 20.0, 40.0, 80.0)
BLURS = (0.5, 1.0, 2.0, 4.0)


def noise_accuracy(
    model: nn.Module,
    batches: Batches,
    *,
    deviations: Sequence[float] = DEVIATIONS,
    blurs: Sequence[float] = BLURS,
    **options: Unpack[AccuracyOptions],
) -> AccuracyCurves:
    """Return a model's accuracy under Gaussian noise, shot noise and Gaussian blur.

    Hyeon-Woo et al.'s Table 9 has Gaussian noise of 5 and 10, blur of 1 and 2 and one strength of shot noise, which it
    does not name, on segmentation; here their accuracy in classification is followed further. Pixels are cut off at 0
    and 1.

    Memory: that of `vtk.analysis.measures.accuracy.accuracies`.

    Args:
        model: classifier.
        batches: normalised images and labels (B,).
        deviations: of both noises, in 1/255 of the pixel range, growing; shot noise's is that of a white pixel.
        blurs: deviations of the blur in pixels of the model's input, growing.
        options: see `vtk.analysis.measures.accuracy.AccuracyOptions`.

    Returns:
        Curves ``Gaussian noise`` and ``shot noise`` by deviation in 1/255 of the pixel range, the latter of a white
        pixel; ``Gaussian blur`` by deviation in pixels of the model's input.

    Raises:
        UsageError: a strength is negative.
        DataError: there are no images.
    """
    check_keywords("noise_accuracy", options, AccuracyOptions)
    for name, values in (("deviations", deviations), ("blurs", blurs)):
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise UsageError(f"`{name}` are {list(values)}; give 0 or more")
    kinds = (
        ("Gaussian noise", "deviation, 255ths of the pixel range", gaussian_noise, [v / 255 for v in deviations]),
        (
            "shot noise",
            "deviation of a white pixel, 255ths of the pixel range",
            shot_noise,
            [v / 255 for v in deviations],
        ),
        ("Gaussian blur", "deviation, pixels", gaussian_blur, list(blurs)),
    )
    changes: dict[str, Change] = {
        f"{name} {i}": partial(change, deviation=value)
        for name, _, change, values in kinds
        for i, value in enumerate(values)
    }
    accuracy = accuracies(model, batches, changes, **options)
    curves = []
    for (name, unit, _, values), shown in zip(kinds, (deviations, deviations, blurs), strict=True):
        fractions = tuple(accuracy.changed[f"{name} {i}"] for i in range(len(values)))
        curves.append(Curve(name, unit, tuple(shown), fractions))
    return AccuracyCurves(accuracy.clean, tuple(curves), accuracy.classes, accuracy.images)


def gaussian_noise(pixels: Tensor, draws: Draws, deviation: float) -> Tensor:
    """Return pixels with independent Gaussian noise; ``deviation`` in units of the pixel range."""
    return pixels + deviation * draws.normal("gaussian noise")


def shot_noise(pixels: Tensor, draws: Draws, deviation: float) -> Tensor:
    """Return pixels as a sensor counts them: Poisson, of variance in proportion to brightness.

    A white pixel counts 1/deviation² photons on average, so that its noise has that deviation.
    """
    if deviation == 0:
        return pixels
    photons = deviation**-2
    return draws.poisson("shot noise", pixels.clamp_min(0) * photons) / photons


def gaussian_blur(pixels: Tensor, draws: Draws, deviation: float) -> Tensor:
    """Return pixels blurred by a Gaussian, cut off at three deviations; ``deviation`` in pixels, edges mirrored."""
    from torchvision.transforms.v2 import functional as tv

    if deviation == 0:
        return pixels
    height, width = pixels.shape[-2:]
    reach = math.ceil(3 * deviation)
    # rows and then columns: the two-dimensional kernel is their product, and far slower
    for size in ([2 * min(reach, width - 1) + 1, 1], [1, 2 * min(reach, height - 1) + 1]):
        pixels = tv.gaussian_blur(pixels, size, [deviation, deviation])
    return pixels
