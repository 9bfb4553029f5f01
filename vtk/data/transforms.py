"""From an upright RGB image to the model's input, for evaluation and for training."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import auto_augment as auto_augment_ops
from timm.data import create_transform
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import str_to_pil_interp
from torch import Tensor

from vtk.card import InputSpec
from vtk.errors import UsageError

_CROP_MODES = {"crop": "center", "squash": "squash", "pad": "border"}
_ASPECTS = (3 / 4, 4 / 3)
_WORD = re.compile(r"t[a-z0-9_]+|[a-z]+\d[\d.]*")


class EvalTransform:
    """Resize, crop or pad, and normalise, the same way every time; made by `eval_transform`.

    Attributes:
        random: False: the loader need not seed anything for it.
    """

    random = False

    def __init__(self, spec: InputSpec) -> None:
        # `crop_pct` belongs to the centre crop; squash and pad are chosen in order to see the whole image.
        steps = create_transform(
            input_size=spec.size,
            interpolation=spec.interpolation,
            crop_pct=spec.crop_pct if spec.resize_mode == "crop" else 1.0,
            crop_mode=_CROP_MODES[spec.resize_mode],
            mean=_rgb_mean(spec),
            use_prefetcher=True,
        )
        self.spec = spec
        self.geometry: list[Callable[[Any], Any]] = steps.transforms[:-1]
        if spec.resize_mode == "pad":
            self.geometry[0] = _FitInside(spec)
        self.normalize = Normalize(spec)

    def __call__(self, image: Image.Image) -> Tensor:
        """Turn an RGB image into a (C, H, W) fp32 tensor."""
        for step in self.geometry:
            image = step(image)
        return self.normalize(image)


class TrainTransform:
    """Random crop, flip and augmentation, then normalise; made by `train_transform`.

    Attributes:
        random: True: it draws from Python's, NumPy's and torch's generators.
    """

    random = True

    def __init__(self, spec: InputSpec, steps: list[Callable[[Any], Any]], erase: RandomErasing | None) -> None:
        self.spec, self.steps, self.erase = spec, steps, erase
        self.normalize = Normalize(spec)

    def __call__(self, image: Image.Image) -> Tensor:
        """Turn an RGB image into a (C, H, W) fp32 tensor."""
        for step in self.steps:
            image = step(image)
        tensor = self.normalize(image)
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

    def __call__(self, image: Image.Image) -> Tensor:
        """Normalise an RGB image; for one-channel models its luminance."""
        pixels = np.asarray(image.convert("L") if self.grey else image)
        out = np.empty((len(self.table), image.height, image.width), dtype=np.float32)
        for c, levels in enumerate(self.table):
            # "wrap" never wraps 8-bit indices; it only spares NumPy the bounds check and a buffer
            np.take(levels, pixels if self.grey else pixels[..., c], out=out[c], mode="wrap")
        return torch.from_numpy(out)


class _FitInside:
    """timm's ResizeKeepRatio on the longer side, but a very long, thin image keeps at least one pixel of width."""

    def __init__(self, spec: InputSpec) -> None:
        self.size, self.resample = spec.size, str_to_pil_interp(spec.interpolation)

    def __call__(self, image: Image.Image) -> Image.Image:
        scale = min(self.size[0] / image.height, self.size[1] / image.width)
        return image.resize(
            (max(round(image.width * scale), 1), max(round(image.height * scale), 1)), resample=self.resample
        )


def eval_transform(spec: InputSpec) -> EvalTransform:
    """Return the preprocessing of evaluation, prediction and export checks.

    ``crop`` is timm's: resize so that the image covers size / crop_pct, cut the centre. ``squash`` resizes both sides
    to the size; ``pad`` fits the image inside and fills with the mean colour. The last two show the whole image, so
    ``crop_pct`` does not apply to them.

    Raises:
        UsageError: a number of channels other than 1 or 3, or an unknown interpolation.
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
) -> TrainTransform:
    """Return the preprocessing of training: random resized crop, flip, augmentation.

    The crop's aspect ratio varies by 3/4…4/3 around the input's own (around 1 with ``squash``, where evaluation
    distorts too), so that a wide input is trained on images of right proportions.

    Args:
        spec: size, interpolation, mean and std.
        crop_scale: smallest and largest area of the crop, as fractions of the image's.
        hflip: probability of mirroring left and right.
        auto_augment: timm's words, such as ``rand-m9-mstd0.5-inc1``; None for none.
        color_jitter: strength of brightness, contrast and saturation changes; None for none. With ``auto_augment``
            it is left out, as in timm.
        reprob: probability of erasing a random rectangle.

    Raises:
        UsageError: a value out of range, unknown words in ``auto_augment``, a number of channels other than 1 or 3.
    """
    _check(spec)
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
    steps = [*geometry.transforms, *colour.transforms]
    _mend_posterize(steps)
    erase = RandomErasing(reprob, mode="const", device="cpu") if reprob > 0 else None
    return TrainTransform(spec, steps, erase)


def _unknown_words(auto_augment: str | None) -> UsageError:
    return UsageError(f"auto_augment {auto_augment!r} is not in timm's words; give for example rand-m9-mstd0.5-inc1")


def _mend_posterize(steps: list[Any]) -> None:
    """At full strength timm asks for 0 bits, an all-black image; newer Pillow refuses that. Keep one bit."""
    for step in steps:
        policies = [getattr(step, "ops", None) or [], *(getattr(step, "policy", None) or [])]
        for op in (op for ops in policies for op in ops):
            if op.aug_fn is auto_augment_ops.posterize:
                op.aug_fn = _posterize


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    return image if bits >= 8 else ImageOps.posterize(image, max(bits, 1))


def _check(spec: InputSpec) -> None:
    if spec.in_chans not in (1, 3):
        raise UsageError(f"the model takes {spec.in_chans} channels; image files can fill 1 (grey) or 3 (RGB)")
    if spec.interpolation not in ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"):
        raise UsageError(f"unknown interpolation {spec.interpolation!r}; give bicubic, bilinear or nearest")
    if spec.resize_mode not in _CROP_MODES:
        raise UsageError(f"unknown resize mode {spec.resize_mode!r}; give crop, squash or pad")


def _rgb_mean(spec: InputSpec) -> tuple[float, ...]:
    """Fill colour of padding and of geometric augmentation: images are RGB until they are normalised."""
    return spec.mean if len(spec.mean) == 3 else spec.mean * 3
