"""Calibrates a model in fp8 on training images, and accepts it only if it agrees with fp32 on held-out images."""

import torch
from torch import Tensor, nn

from vtk import console
from vtk.card import Card
from vtk.data.decoding.decode import pixel_limit
from vtk.errors import VerificationError
from vtk.evaluation.intervals import wilson
from vtk.fused import Fp8ViT, fuse, to_fp8
from vtk.fused.fp8 import check_fp8, check_fp8_device
from vtk.models.fp32 import FullPrecision
from vtk.runtime.data_option import DataImages
from vtk.runtime.photographs import Photographs

CALIBRATED, JUDGED = 128, 256
"""Most images."""

LEAST_AGREEMENT = 0.99
"""Least top-1 agreement with fp32."""

_BATCH = 16


def calibrate(model: nn.Module, device: torch.device, given: DataImages) -> Fp8ViT:
    """Round a model to fp8 and return it, if its predictions agree with fp32.

    Args:
        model: a timm Vision Transformer in fp32; it is consumed.
        device: to run on; a CPU simulates fp8, and a line says so.
        given: training images to calibrate on, held-out images to verify with.

    Raises:
        UsageError: a part of the model cannot be fused, or a matrix cannot be in fp8.
        UnavailableError: the GPU has no fp8 products.
        DataError: an image is needed and none can be read.
        VerificationError: top-1 agreement with fp32 below 99 % on the held-out images.
    """
    check_fp8_device(device)
    fused = fuse(model, torch.float32, keep_source=False).to(device)
    check_fp8(fused)
    training, held_out = given.calibration
    card, most = given.card, pixel_limit(given.card)
    batches = [images for images, _ in Photographs(training, CALIBRATED, max_pixels=most).batches(card.input, _BATCH)]
    if device.type == "cpu":
        console.say("fp8: calibrating, which takes a CPU minutes for all but small models")
    fp8 = to_fp8(fused, batches)
    how = ", simulated on the CPU: the outputs are those of a GPU, the time is not" if device.type == "cpu" else ""
    console.say(f"fp8: calibrated on {sum(map(len, batches))} {training.what}{how}")
    judging = Photographs(held_out, JUDGED, max_pixels=most)
    same, count = _agreement(model.eval().to(device), fp8, judging, card, device)
    check_agreement(same, count, held_out.what)
    return fp8


def _agreement(
    model: nn.Module, fp8: nn.Module, photographs: Photographs, card: Card, device: torch.device
) -> tuple[int, int]:
    """Return the number of images with the same most likely class, and the number of images."""
    full, same, count = FullPrecision(), 0, 0
    try:
        with torch.inference_mode():
            for images, _ in photographs.batches(card.input, _BATCH):
                mine, theirs = (_classes(one(images.to(device))) for one in (fp8, model))
                same += int((mine == theirs).sum())
                count += len(images)
    finally:
        full.release()
    return same, count


def _classes(logits: Tensor) -> Tensor:
    """Return the most likely class of each row; NaN, which equals nothing, for a row that is not finite."""
    return torch.where(logits.isfinite().all(1), logits.argmax(1).float(), torch.nan)


def check_agreement(same: int, count: int, what: str, instead: str = "--precision bf16") -> None:
    """Print the top-1 agreement of fp8 with fp32, and refuse fp8 if it is too low.

    Args:
        same: images with the same most likely class.
        count: images.
        what: description of the images.
        instead: advice if it is refused.

    Raises:
        VerificationError: less than 99 %.
    """
    low, high = (console.percent(bound) for bound in wilson(same, count))
    found = (
        f"the most likely class is that of fp32 in {same} of {count} {what}, {console.percent(same / count)} "
        f"(95 % interval {low} to {high})"
    )
    if same / count < LEAST_AGREEMENT:
        raise VerificationError(f"fp8: {found}, needed is {console.percent(LEAST_AGREEMENT, 0)}; use {instead}")
    console.say(f"fp8: {found}")
