"""How training images and their labels are varied."""

from dataclasses import dataclass, field

from vtk.training.options.checks import require
from vtk.training.options.views import ViewOptions


@dataclass(frozen=True)
class AugmentOptions(ViewOptions):
    """Smoothed and mixed labels, random crops and colours, stochastic depth."""

    smoothing: float = field(default=0.1, metadata={"help": "label smoothing"})
    mixup: float = field(default=0.0, metadata={"help": "alpha of mixup, 0 for none (0.8 is usual)"})
    cutmix: float = field(default=0.0, metadata={"help": "alpha of cutmix, 0 for none (1.0 is usual)"})
    mix_prob: float = field(
        default=1.0,
        metadata={"help": "share of batches that are mixed, where mixup or cutmix is on"},
    )
    reprob: float = field(default=0.0, metadata={"help": "probability of erasing a random rectangle"})

    def _check_augment(self) -> None:
        self._check_views()
        for name in ("mixup", "cutmix"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or above")
        require(0 <= self.smoothing < 1, "smoothing", self.smoothing, "from 0 to below 1")
        for name in ("reprob", "mix_prob"):
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "from 0 to 1")
