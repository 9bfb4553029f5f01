"""Views of an image for DINO: two whole ones and several small crops, in one tensor (Caron et al. 2021, section 3.1).

A view of an image is a random crop of a share of its area, flipped, with changed colours, blurred or solarised. The two
whole views have the size of the model's input, the crops a smaller one: the student sees all of them, the teacher the
whole ones. The authors' code blurs the first whole view always, the second with probability 0.1 and crops with 0.5, by
a Gaussian of 0.1 to 2 px at 224 px; it solarises the second with probability 0.2.
"""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torchvision.transforms import ColorJitter, RandomApply, RandomGrayscale, RandomSolarize

from vtk.card import InputSpec
from vtk.data.loading.train_pipeline import TrainTransform

WHOLE = 2
"""Views of the teacher."""
_SIZE = 224  # px, of the authors' radii
_RADII = (0.1, 2.0)  # px
_SHARE = 3 / 7  # of a side: 96 of 224 px


@dataclass(frozen=True)
class Crops:
    """The sizes of the views of an image.

    Attributes:
        in_chans: channels.
        size: height and width of the whole views, in pixels.
        small: height and width of the crops.
        count: number of crops.
    """

    in_chans: int
    size: tuple[int, int]
    small: tuple[int, int]
    count: int

    @property
    def views(self) -> int:
        """Views of an image, whole ones and crops."""
        return WHOLE + self.count

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the whole views (2·B, C, H, W) and the crops (count·B, C, h, w) of packed images (B, numbers).

        Both are ordered by view: the first B are the first view of every image.
        """
        numbers = WHOLE * self.in_chans * self.size[0] * self.size[1]
        parts = zip((rows[:, :numbers], rows[:, numbers:]), (WHOLE, self.count), (self.size, self.small), strict=True)
        whole, crops = (
            part.reshape(len(rows), count, self.in_chans, *size).transpose(0, 1).flatten(0, 1)
            for part, count, size in parts
        )
        return whole, crops


class MultiCrop:
    """All views of an image as one row of numbers, which `Crops.split` takes apart.

    Args:
        whole: transforms of the two whole views.
        small: of the crops.
        count: number of crops.
    """

    random = True

    def __init__(self, whole: tuple[TrainTransform, TrainTransform], small: TrainTransform, count: int) -> None:
        self.whole, self.small, self.count, self.spec = whole, small, count, whole[0].spec

    def __call__(self, image: Any) -> Tensor:
        """Return the numbers of all views, whole ones first."""
        views = [view(image) for view in self.whole] + [self.small(image) for _ in range(self.count)]
        return torch.cat([view.flatten() for view in views])


class Blur:
    """A Gaussian blur of random radius, by chance.

    Args:
        probability: of blurring.
        side: pixels of the view; the radius is in proportion.
    """

    def __init__(self, probability: float, side: int) -> None:
        self.probability, self.radii = probability, tuple(radius * side / _SIZE for radius in _RADII)

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return the image, blurred or not."""
        if random.random() >= self.probability:
            return image
        return image.filter(ImageFilter.GaussianBlur(random.uniform(*self.radii)))


def color_steps(strength: float, blur: float, solarise: float, side: int) -> list[Callable[[Any], Any]]:
    """Return the changes of colours and sharpness of a view.

    Args:
        strength: of brightness and contrast; saturation has half of it, hue a quarter (the authors: 0.4, 0.2, 0.1).
        blur: probability.
        solarise: probability.
        side: pixels of the view that the radius of the blur is in proportion to: of the whole view's side.
    """
    jitter = ColorJitter(strength, strength, strength / 2, min(strength / 4, 0.5))
    steps: list[Callable[[Any], Any]] = [RandomApply([jitter], 0.8), RandomGrayscale(0.2), Blur(blur, side)]
    return steps + ([RandomSolarize(128, solarise)] if solarise else [])


def multi_crop(
    augment: Callable[..., TrainTransform], crops: Crops, small_scale: tuple[float, float], strength: float | None
) -> MultiCrop:
    """Return the transform from an image to all of its views.

    Args:
        augment: makes a transform of random crop and flip; its arguments are those of `train_transform` to change.
        crops: sizes of the views.
        small_scale: smallest and largest area of the crops, as fractions of the image's.
        strength: of the change of colours; None for no change of colours and sharpness.
    """
    first, second = augment(), augment()
    spec: InputSpec = dataclasses.replace(first.spec, height=crops.small[0], width=crops.small[1])
    small = augment(spec=spec, crop_scale=small_scale)
    if strength is not None:
        side = max(crops.size)
        first.steps += color_steps(strength, 1.0, 0.0, side)
        second.steps += color_steps(strength, 0.1, 0.2, side)
        small.steps += color_steps(strength, 0.5, 0.0, side)
    return MultiCrop((first, second), small, crops.count)


def small_size(size: tuple[int, int], patch: int) -> tuple[int, int]:
    """Return the default size of crops: 3/7 of the whole view's (96 of 224 px), in whole patches of ``patch`` px."""
    height, width = (max(1, round(side * _SHARE / patch)) * patch for side in size)
    return height, width
