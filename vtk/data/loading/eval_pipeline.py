"""Preprocessing of evaluation: from an upright image to the model's input, the same way every time."""

import os
from collections.abc import Callable
from typing import Any

from PIL import Image
from timm.data import create_transform
from torch import Tensor

from vtk.card import InputSpec
from vtk.data.decoding.bands import Bands
from vtk.data.decoding.decode import read_image
from vtk.data.decoding.images import TooLargeError, unreadable
from vtk.data.decoding.rules import Decoding
from vtk.data.decoding.thin_images import check_enlarged
from vtk.data.loading.normalization import Normalize
from vtk.data.loading.timm_fixes import FitInside
from vtk.errors import DataError, UsageError

CROP_MODES = {"crop": "center", "squash": "squash", "pad": "border"}
Step = Callable[[Any], Any]


class EvalTransform:
    """Deterministic resize, crop or pad, and normalisation; made by `eval_transform`.

    Attributes:
        random: False: the loader seeds no generators for it.
    """

    random = False

    def __init__(self, spec: InputSpec) -> None:
        self.spec = spec
        self.geometry = geometry_steps(spec, rgb_mean(spec))
        self.of_channel: list[list[Step]] = []
        if spec.in_chans not in (1, 3):  # each channel has its own fill value
            self.of_channel = [geometry_steps(spec, (mean,)) for mean in spec.mean]
        self.normalize = Normalize(spec)

    def __call__(self, image: Image.Image | Bands) -> Tensor:
        """Return the (C, H, W) fp32 tensor of an image from `vtk.data.read_image`.

        Raises:
            DataError: a thin image would need too much memory (`vtk.data.decoding.thin_images`).
        """
        first = image[0] if isinstance(image, tuple) else image
        try:
            check_enlarged(self.spec, first.height, first.width)
            if isinstance(image, tuple):
                pairs = zip(self.of_channel, image, strict=True)
                return self.normalize(tuple(apply_steps(steps, band) for steps, band in pairs))
            return self.normalize(apply_steps(self.geometry, image))
        except (TooLargeError, MemoryError) as error:
            why = str(error) or "not enough memory"
            raise DataError(f"an image cannot be used: {why}") from error


def eval_transform(spec: InputSpec) -> EvalTransform:
    """Return the preprocessing of evaluation, prediction and export checks.

    ``crop`` is timm's: resize so that the image covers size / crop_pct, then crop the centre. ``squash`` resizes to the
    size, ignoring the aspect ratio; ``pad`` fits the image inside and fills with the mean colour. These two keep the
    whole image, so ``crop_pct`` does not apply to them.

    Raises:
        UsageError: no channels, or an unknown interpolation.
    """
    check_spec(spec)
    return EvalTransform(spec)


def read_input(
    path: str | os.PathLike[str], transform: EvalTransform, max_pixels: int, decoding: Decoding | None = None
) -> Tensor:
    """Return a file as the model's input, (C, H, W) fp32.

    Args:
        path: the file.
        transform: from `eval_transform`.
        max_pixels: largest image.
        decoding: rules of decoding; by default those of the transform's input.

    Raises:
        DataError: the file cannot be read or used; the message names it.
    """
    image = read_image(path, transform.spec.in_chans, max_pixels, decoding or Decoding.of(transform.spec))
    try:
        return transform(image)
    except DataError as error:
        raise unreadable(path, error.__cause__ or error) from error


def apply_steps(steps: list[Step], image: Image.Image) -> Image.Image:
    """Return the image after all steps."""
    for step in steps:
        image = step(image)
    return image


def geometry_steps(spec: InputSpec, mean: tuple[float, ...]) -> list[Step]:
    """Return timm's steps of evaluation before normalisation; ``mean`` is the fill colour of padding."""
    # `crop_pct` applies to the centre crop only; squash and pad keep the whole image.
    transform = create_transform(
        input_size=spec.size,
        interpolation=spec.interpolation,
        crop_pct=spec.crop_pct if spec.resize_mode == "crop" else 1.0,
        crop_mode=CROP_MODES[spec.resize_mode],
        mean=mean,
        use_prefetcher=True,
    )
    steps: list[Step] = transform.transforms[:-1]
    if spec.resize_mode == "pad":
        steps[0] = FitInside(spec)
    return steps


def check_spec(spec: InputSpec) -> None:
    """Refuse an input without channels, or of an unknown interpolation or resize mode.

    Raises:
        UsageError: says what is allowed.
    """
    if spec.in_chans < 1 or not len(spec.mean) == len(spec.std) == spec.in_chans:
        raise UsageError(f"the model takes {spec.in_chans} channels; give as many values of mean and std")
    if spec.interpolation not in ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"):
        raise UsageError(f"unknown interpolation {spec.interpolation!r}; give bicubic, bilinear or nearest")
    if spec.resize_mode not in CROP_MODES:
        raise UsageError(f"unknown resize mode {spec.resize_mode!r}; give crop, squash or pad")


def rgb_mean(spec: InputSpec) -> tuple[float, ...]:
    """Return the fill colour of padding and geometric augmentation; images are RGB until normalisation."""
    return spec.mean if len(spec.mean) == 3 else spec.mean[:1] * 3
