"""How training images and their labels are varied, and which of the model's blocks are left out at random."""

from dataclasses import dataclass, field

from vtk.training.options.checks import require


@dataclass(frozen=True)
class AugmentOptions:
    """Smoothed and mixed labels, random crops and colours, stochastic depth."""

    smoothing: float = field(default=0.1, metadata={"help": "label smoothing"})
    mixup: float = field(default=0.0, metadata={"help": "alpha of mixup, 0 for none (0.8 is usual)"})
    cutmix: float = field(default=0.0, metadata={"help": "alpha of cutmix, 0 for none (1.0 is usual)"})
    mix_prob: float = field(
        default=1.0,
        metadata={"help": "share of batches that are mixed, where mixup or cutmix is on"},
    )
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
    reprob: float = field(default=0.0, metadata={"help": "probability of erasing a random rectangle"})
    drop_path: float = field(default=0.0, metadata={"help": "highest stochastic depth rate, rising over the blocks"})

    def _check_augment(self) -> None:
        require(self.color_jitter is None or 0 <= self.color_jitter <= 1, "color_jitter", self.color_jitter, "0 to 1")
        for name in ("mixup", "cutmix"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or above")
        for name in ("smoothing", "drop_path"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "from 0 to below 1")
        for name in ("hflip", "reprob", "mix_prob"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "from 0 to 1")
        scale = self.crop_scale
        fits = len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1
        require(fits, "crop_scale", scale, "two areas, 0 < smallest ≤ largest ≤ 1")
