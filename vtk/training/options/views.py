"""How training images are varied and which of the model's blocks are left out at random, whatever is minimised."""

from dataclasses import dataclass, field

from vtk.training.options.checks import require


@dataclass(frozen=True)
class ViewOptions:
    """Random crops and colours, stochastic depth."""

    crop_scale: tuple[float, ...] = field(
        default=(0.6, 1.0),
        metadata={"help": "smallest and largest area of a random training crop"},
    )
    hflip: float = field(
        default=0.5,
        metadata={"help": "probability of a mirrored training image; 0 where left and right matter"},
    )
    auto_augment: str | None = field(
        default=None,
        metadata={"help": "timm's string, for instance rand-m9-mstd0.5-inc1 (RandAugment)"},
    )
    color_jitter: float | None = field(
        default=None,
        metadata={"help": "strength of brightness, contrast and saturation changes"},
    )
    drop_path: float = field(default=0.0, metadata={"help": "highest stochastic depth rate, rising over the blocks"})

    def _check_views(self) -> None:
        require(self.color_jitter is None or 0 <= self.color_jitter <= 1, "color_jitter", self.color_jitter, "0 to 1")
        require(0 <= self.hflip <= 1, "hflip", self.hflip, "from 0 to 1")
        require(0 <= self.drop_path < 1, "drop_path", self.drop_path, "from 0 to below 1")
        scale = self.crop_scale
        fits = len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1
        require(fits, "crop_scale", scale, "two areas, 0 < smallest ≤ largest ≤ 1")
