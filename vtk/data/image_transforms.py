"""From an upright RGB image to the model's input, for evaluation and for training."""

import dataclasses
import os
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import RandomCrop

from vtk.card import InputSpec
from vtk.data.bands import Bands, read_image
from vtk.data.decoding_rules import Decoding
from vtk.data.images import TooLargeError, unreadable
from vtk.data.thin_images import check_enlarged
from vtk.data.timm_fixes import FitInside, mend_crops, mend_posterize
from vtk.errors import DataError, UsageError

_CROP_MODES = {"crop": "center", "squash": "squash", "pad": "border"}
_ASPECTS = (3 / 4, 4 / 3)
Step = Callable[[Any], Any]
_WORD = re.compile(r"t[a-z0-9_]+|[a-z]+\d[\d.]*")


class EvalTransform:
    """Resize, crop or pad, and normalise, the same way every time; made by `eval_transform`.

    Attributes:
        random: False: the loader need not seed anything for it.
    """

    random = False

    def __init__(self, spec: InputSpec) -> None:
        self.spec = spec
        self.geometry = _geometry(spec, _rgb_mean(spec))
        self.of_channel: list[list[Step]] = []
        if spec.in_chans not in (1, 3):  # padding has a colour of its own in each
            self.of_channel = [_geometry(spec, (mean,)) for mean in spec.mean]
        self.normalize = Normalize(spec)

    def __call__(self, image: Image.Image | Bands) -> Tensor:
        """Turn what `vtk.data.bands.read_image` gives into a (C, H, W) fp32 tensor.

        Raises:
            DataError: a thin image would take too much memory (`vtk.data.thin_images`).
        """
        first = image[0] if isinstance(image, tuple) else image
        try:
            check_enlarged(self.spec, first.height, first.width)
            if isinstance(image, tuple):
                pairs = zip(self.of_channel, image, strict=True)
                return self.normalize(tuple(_follow(steps, band) for steps, band in pairs))
            return self.normalize(_follow(self.geometry, image))
        except (TooLargeError, MemoryError) as error:
            why = str(error) or "there is not enough memory for it"
            raise DataError(f"an image cannot be used: {why}") from error


class TrainTransform:
    """Random crop, flip and augmentation, then normalise; made by `train_transform`.

    Attributes:
        random: True: it draws from Python's, NumPy's and torch's generators.
    """

    random = True

    def __init__(self, spec: InputSpec, steps: list[Callable[[Any], Any]], erase: RandomErasing | None) -> None:
        self.spec, self.steps, self.erase = spec, steps, erase
        self.normalize = Normalize(spec)

    def __call__(self, image: Image.Image | Bands) -> Tensor:
        """Turn what `vtk.data.bands.read_image` gives into a (C, H, W) fp32 tensor."""
        if isinstance(image, tuple):
            before = random.getstate(), torch.default_generator.get_state()
            bands = []
            for band in image:  # every channel is cut and mirrored alike
                random.setstate(before[0])
                torch.default_generator.set_state(before[1])
                bands.append(_follow(self.steps, band))
            tensor = self.normalize(tuple(bands))
        else:
            tensor = self.normalize(_follow(self.steps, image))
        return tensor if self.erase is None else self.erase(tensor)


class Normalize:
    """(value / 255 - mean) / std of an 8-bit image, as a (C, H, W) fp32 tensor.

    The arithmetic is done once for the 256 possible values of each channel and then looked up: bit-equal to
    torchvision's ToTensor and Normalize.
    """

    def __init__(self, spec: InputSpec) -> None:
        levels = torch.arange(256, dtype=torch.uint8).to(torch.float32).div(255)
        mean, std = torch.tensor(spec.mean), torch.tensor(spec.std)
        self.grey = spec.in_chans == 1
        self.table: list[np.ndarray] = [levels.sub(m).div(s).numpy() for m, s in zip(mean, std, strict=True)]

    def __call__(self, image: Image.Image | Bands) -> Tensor:
        """Normalise an RGB image, for one-channel models its luminance; or channels, one by one."""
        if isinstance(image, tuple):
            planes = [np.asarray(band) for band in image]
        elif self.grey:
            planes = [np.asarray(image.convert("L"))]
        else:
            planes = list(np.moveaxis(np.asarray(image), 2, 0))
        out = np.empty((len(self.table), *planes[0].shape), dtype=np.float32)
        for c, (levels, plane) in enumerate(zip(self.table, planes, strict=True)):
            # "wrap" never wraps 8-bit indices; it only spares NumPy the bounds check and a buffer
            np.take(levels, plane, out=out[c], mode="wrap")
        return torch.from_numpy(out)


def _follow(steps: list[Step], image: Image.Image) -> Image.Image:
    for step in steps:
        image = step(image)
    return image


def _geometry(spec: InputSpec, mean: tuple[float, ...]) -> list[Step]:
    # `crop_pct` belongs to the centre crop; squash and pad are chosen in order to see the whole image.
    transform = create_transform(
        input_size=spec.size,
        interpolation=spec.interpolation,
        crop_pct=spec.crop_pct if spec.resize_mode == "crop" else 1.0,
        crop_mode=_CROP_MODES[spec.resize_mode],
        mean=mean,
        use_prefetcher=True,
    )
    steps: list[Step] = transform.transforms[:-1]
    if spec.resize_mode == "pad":
        steps[0] = FitInside(spec)
    return steps


def read_input(
    path: str | os.PathLike[str], transform: EvalTransform, max_pixels: int, decoding: Decoding | None = None
) -> Tensor:
    """Return what evaluation makes of a file, (C, H, W) fp32.

    Args:
        path: the file.
        transform: made by `eval_transform`.
        max_pixels: a larger image cannot be read.
        decoding: how it becomes an 8-bit one, by default as the transform's input says.

    Raises:
        DataError: the file cannot be read or used; the message names it.
    """
    image = read_image(path, transform.spec.in_chans, max_pixels, decoding or Decoding.of(transform.spec))
    try:
        return transform(image)
    except DataError as error:
        raise unreadable(path, error.__cause__ or error) from error


def eval_transform(spec: InputSpec) -> EvalTransform:
    """Return the preprocessing of evaluation, prediction and export checks.

    ``crop`` is timm's: resize so that the image covers size / crop_pct, cut the centre. ``squash`` resizes both sides
    to the size; ``pad`` fits the image inside and fills with the mean colour. The last two show the whole image, so
    ``crop_pct`` does not apply to them.

    Raises:
        UsageError: no channels, or an unknown interpolation.
    """
    _check(spec)
    return EvalTransform(spec)


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

    The crop's aspect ratio varies by 3/4…4/3 around the input's own (around 1 with ``squash``, where evaluation
    distorts too), so that a wide input is trained on images of right proportions.

    Args:
        spec: size, interpolation, mean and std.
        crop_scale: smallest and largest area of the crop, as fractions of the image's.
        hflip: probability of mirroring left and right.
        auto_augment: timm's words, such as ``rand-m9-mstd0.5-inc1``; None for none.
        color_jitter: strength of brightness, contrast and saturation changes; None for none. With ``auto_augment``
            it is left out, as in timm; 3-Augment (``3a``) takes both.
        reprob: probability of erasing a random rectangle.
        remode: what it is filled with: ``const`` (the mean), ``rand`` (one normal colour) or ``pixel`` (normal noise).
        crop_pad: pixels of black border; above 0 the crop is not resized: it is cut, at the input's size, from the
            image as evaluation sees it all (``crop_pct`` 1) with that border.

    Raises:
        UsageError: a value out of range, unknown words in ``auto_augment``, or changes of colour of what has none.
    """
    _check(spec)
    if spec.in_chans not in (1, 3) and (auto_augment or color_jitter):
        name = "auto-augment" if auto_augment else "color-jitter"
        raise UsageError(f"`--{name}` changes colours; with --in-chans {spec.in_chans} images have none: leave it out")
    low, high = crop_scale
    if not 0 < low <= high <= 1:
        raise UsageError(f"the crop scale is {low} to {high}; give two fractions with 0 < low ≤ high ≤ 1")
    for name, value in (("hflip", hflip), ("reprob", reprob)):
        if not 0 <= value <= 1:
            raise UsageError(f"{name} is {value}; it is a probability, give 0 to 1")
    if color_jitter is not None and color_jitter < 0:
        raise UsageError(f"the colour jitter is {color_jitter}; give 0 or more")
    words = (auto_augment or "").split("-")
    if any(not _WORD.fullmatch(word) for word in words[1:]):  # timm passes over a word without a number
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
            mean=_rgb_mean(spec),
            separate=True,
        )
    except (AssertionError, ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise _unknown_words(auto_augment) from error
    crop = mend_crops(geometry.transforms, spec)
    if crop_pad:
        crop = [*_padded_crop(spec, crop_pad), *crop[1:]]
    steps = [*crop, *colour.transforms]
    mend_posterize(steps)
    erase = RandomErasing(reprob, mode=remode, device="cpu") if reprob > 0 else None
    return TrainTransform(spec, steps, erase)


def _padded_crop(spec: InputSpec, pad: int) -> list[Step]:
    if spec.resize_mode == "pad" and spec.in_chans not in (1, 3):  # each channel's border has a colour of its own
        raise UsageError(f"`--crop-pad` {pad} and --resize-mode pad take 1 or 3 channels, not {spec.in_chans}")
    whole = _geometry(dataclasses.replace(spec, crop_pct=1.0), _rgb_mean(spec))
    return [*whole, RandomCrop(spec.size, padding=pad)]


def _unknown_words(auto_augment: str | None) -> UsageError:
    return UsageError(f"auto_augment {auto_augment!r} is not in timm's words; give for example rand-m9-mstd0.5-inc1")


def _check(spec: InputSpec) -> None:
    if spec.in_chans < 1 or not len(spec.mean) == len(spec.std) == spec.in_chans:
        raise UsageError(f"the model takes {spec.in_chans} channels; give so many values of mean and std (one or more)")
    if spec.interpolation not in ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"):
        raise UsageError(f"unknown interpolation {spec.interpolation!r}; give bicubic, bilinear or nearest")
    if spec.resize_mode not in _CROP_MODES:
        raise UsageError(f"unknown resize mode {spec.resize_mode!r}; give crop, squash or pad")


def _rgb_mean(spec: InputSpec) -> tuple[float, ...]:
    """Fill colour of padding and of geometric augmentation: images are RGB until they are normalised."""
    return spec.mean if len(spec.mean) == 3 else spec.mean[:1] * 3
