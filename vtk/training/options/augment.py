"""How training images and their labels are varied."""

from dataclasses import dataclass
from typing import Annotated

from vtk.options import Option
from vtk.training.options.views import ViewOptions


@dataclass(frozen=True, kw_only=True)
class AugmentOptions(ViewOptions):
    """Smoothed and mixed labels, random crops and colours, stochastic depth."""

    smoothing: Annotated[float, Option("label smoothing", least=0, below=1)] = 0.1
    mixup: Annotated[float, Option("mixup alpha; 0 = off, 0.8 is usual", often=True, least=0)] = 0.0
    cutmix: Annotated[float, Option("cutmix alpha; 0 = off, 1.0 is usual", least=0)] = 0.0
    mix_prob: Annotated[
        float, Option("fraction of batches that are mixed, if mixup or cutmix is on", least=0, most=1)
    ] = 1.0
    reprob: Annotated[float, Option("random erasing: probability of each image", least=0, most=1)] = 0.0

    def _check_augment(self) -> None:
        self._check_views()
