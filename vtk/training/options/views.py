"""Options of augmentation and stochastic depth."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from vtk.options import Config, Option, require

_AREAS = "two areas, 0 < smallest ≤ largest ≤ 1"
_CROP = Option("random resized crop: smallest and largest area", above=0, most=1, length=2, allowed=_AREAS)
CropScale = Annotated[tuple[float, ...], _CROP]
MaybeCropScale = Annotated[tuple[float, ...] | None, _CROP]
"""None for a default that depends on another option."""


@dataclass(frozen=True, kw_only=True)
class ViewOptions(Config):
    """Random crops and colours, stochastic depth."""

    GROUP: ClassVar[str] = "regularisation"

    crop_scale: CropScale = (0.6, 1.0)
    hflip: Annotated[
        float | None,
        Option("horizontal-flip probability (default: 0.5; digits: 0)", often=True, least=0,
               most=1),
    ] = None  # fmt: skip
    auto_augment: Annotated[
        str | None,
        Option(
            "timm augmentation policy, such as rand-m9-mstd0.5-inc1 (RandAugment)",
            pattern="(rand|augmix|original|v0|3a).*", allowed="timm's rand-…, augmix-…, original, originalr, v0 or 3a",
        ),
    ] = None  # fmt: skip
    color_jitter: Annotated[
        float | None, Option("jitter of brightness, contrast and saturation (default: off)", least=0, most=1)
    ] = None
    drop_path: Annotated[
        float, Option("stochastic depth: rate of the last block, rising linearly", least=0, below=1)
    ] = 0.0

    def _check_views(self) -> None:
        check_areas("crop_scale", self.crop_scale)


def check_areas(name: str, areas: tuple[float, ...] | None) -> None:
    """Refuse areas of an option in the wrong order.

    Raises:
        UsageError: says what is allowed.
    """
    require(areas is None or areas[0] <= areas[1], name, areas, _AREAS)


@dataclass(frozen=True, kw_only=True)
class AugmentOptions(ViewOptions):
    """Smoothed and mixed labels, random crops and colours, stochastic depth."""

    smoothing: Annotated[float, Option("label smoothing", least=0, below=1)] = 0.1
    mixup: Annotated[float, Option("mixup alpha; 0 = off, 0.8 is usual", often=True, least=0)] = 0.0
    cutmix: Annotated[float, Option("cutmix alpha; 0 = off, 1.0 is usual", least=0)] = 0.0
    mix_prob: Annotated[
        float, Option("fraction of batches that are mixed, if mixup or cutmix is on", least=0, most=1)
    ] = 1.0
    reprob: Annotated[float, Option("probability of random erasing", least=0, most=1)] = 0.0

    def _check_augment(self) -> None:
        self._check_views()
