"""Preprocessing of training: from an upright image to the model's input, with random crop, flip and augmentation."""

import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from timm.data import create_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import RandomCrop

from vtk.card import InputSpec
from vtk.data.decoding.bands import Bands
from vtk.data.loading.eval_pipeline import Step, apply_steps, check_spec, geometry_steps, rgb_mean
from vtk.data.loading.normalization import Normalize
from vtk.data.loading.timm_fixes import fix_crops, fix_posterize
from vtk.errors import UsageError

_ASPECTS = (3 / 4, 4 / 3)
_WORD = re.compile(r"t[a-z0-9_]+|[a-z]+\d[\d.]*")


class TrainTransform:
    """Random crop, flip and augmentation, then normalisation; made by `train_transform`.

    Attributes:
        random: True: it uses Python's, NumPy's and torch's generators.
    """

    random = True

    def __init__(self, spec: InputSpec, steps: list[Callable[[Any], Any]], erase: RandomErasing | None) -> None:
        self.spec, self.steps, self.erase = spec, steps, erase
        self.normalize = Normalize(spec)

    def __call__(self, image: Image.Image | Bands) -> Tensor:
        """Return the (C, H, W) fp32 tensor of an image from `vtk.data.read_image`."""
        if isinstance(image, tuple):
            before = random.getstate(), torch.default_generator.get_state()
            bands = []
            for band in image:  # the same crop and flip for every channel
                random.setstate(before[0])
                torch.default_generator.set_state(before[1])
                bands.append(apply_steps(self.steps, band))
            tensor = self.normalize(tuple(bands))
        else:
            tensor = self.normalize(apply_steps(self.steps, image))
        return tensor if self.erase is None else self.erase(tensor)


def train_transform(
    spec: InputSpec,
    *,
    crop_scale: tuple[float, float] = (0.6, 1.0),
    hflip: float = 0.5,
    auto_augment: str | None = None,
    color_jitter: float | None = None,
    reprob: float = 0.0,
    remode: str = "const",
    crop_pad: int = 0,
) -> TrainTransform:
    """Return the preprocessing of training: random crop, flip, augmentation.

    The crop's aspect ratio varies by 3/4…4/3 around the input's (around 1 with ``squash``, which distorts at evaluation
    too), so that a wide input is trained on undistorted images.

    Args:
        spec: size, interpolation, mean and std.
        crop_scale: smallest and largest area of the crop, as fractions of the image's.
        hflip: probability of a horizontal flip.
        auto_augment: a policy in timm's notation, such as ``rand-m9-mstd0.5-inc1``; None for none.
        color_jitter: strength of brightness, contrast and saturation changes; None for none. With ``auto_augment``
            it is not applied, as in timm, except with 3-Augment (``3a``).
        reprob: probability of erasing a random rectangle.
        remode: fill of the rectangle: ``const`` (mean), ``rand`` (one normal colour) or ``pixel`` (normal noise).
        crop_pad: pixels of black border; above 0, a crop of the input's size without resizing, from the image resized
            as in evaluation (``crop_pct`` 1) and padded by this border.

    Raises:
        UsageError: a value out of range, an unknown ``auto_augment``, or colour augmentation of other than RGB images.
    """
    check_spec(spec)
    if spec.in_chans not in (1, 3) and (auto_augment or color_jitter):
        name = "auto-augment" if auto_augment else "color-jitter"
        raise UsageError(f"`--{name}` changes colours, which --in-chans {spec.in_chans} does not have; leave it out")
    low, high = crop_scale
    if not 0 < low <= high <= 1:
        raise UsageError(f"the crop scale is {low} to {high}; give two fractions with 0 < low ≤ high ≤ 1")
    for name, value in (("hflip", hflip), ("reprob", reprob)):
        if not 0 <= value <= 1:
            raise UsageError(f"{name} is {value}; allowed is a probability from 0 to 1")
    if color_jitter is not None and color_jitter < 0:
        raise UsageError(f"the colour jitter is {color_jitter}; allowed is at least 0")
    words = (auto_augment or "").split("-")
    if any(not _WORD.fullmatch(word) for word in words[1:]):  # timm ignores a word without a number
        raise _unknown_words(auto_augment)
    aspect = 1.0 if spec.resize_mode == "squash" else spec.width / spec.height
    try:
        geometry, colour, _ = create_transform(
            input_size=spec.size,
            is_training=True,
            scale=crop_scale,
            ratio=(_ASPECTS[0] * aspect, _ASPECTS[1] * aspect),
            hflip=hflip,
            color_jitter=color_jitter or None,
            auto_augment=auto_augment or None,
            interpolation=spec.interpolation,
            mean=rgb_mean(spec),
            separate=True,
        )
    except (AssertionError, ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise _unknown_words(auto_augment) from error
    crop = fix_crops(geometry.transforms, spec)
    if crop_pad:
        crop = [*_padded_crop(spec, crop_pad), *crop[1:]]
    steps = [*crop, *colour.transforms]
    fix_posterize(steps)
    erase = RandomErasing(reprob, mode=remode, device="cpu") if reprob > 0 else None
    return TrainTransform(spec, steps, erase)


def _padded_crop(spec: InputSpec, pad: int) -> list[Step]:
    if spec.resize_mode == "pad" and spec.in_chans not in (1, 3):  # each channel has its own fill value
        raise UsageError(f"`--crop-pad` {pad} with --resize-mode pad needs 1 or 3 channels, not {spec.in_chans}")
    whole = geometry_steps(dataclasses.replace(spec, crop_pct=1.0), rgb_mean(spec))
    return [*whole, RandomCrop(spec.size, padding=pad)]


def _unknown_words(auto_augment: str | None) -> UsageError:
    return UsageError(f"auto_augment {auto_augment!r} is not a policy of timm; give for example rand-m9-mstd0.5-inc1")
