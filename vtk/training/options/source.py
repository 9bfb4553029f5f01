"""Options of the source: images, model, weights, and the model's input."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.shared import MOST_SIDE, MaybeFolder, TrainShare, ValSplit
from vtk.packs.config import ModelKwargs

ModelName = Annotated[str, Option("timm model name", often=True, nonempty=True)]
InputSize = Annotated[
    int | tuple[int, int] | None,
    Option("input size: N, or height and width (default: model's)", often=True, least=1, most=MOST_SIDE),
]
Pretrained = Annotated[
    bool, Option("start from pretrained weights of the hub", "model", off="start from random weights")
]
_Channels = Annotated[
    tuple[float, ...] | None,
    Option("normalisation mean, one value or one per channel (default: from the pretrained weights)", nonempty=True),
]
_Deviations = Annotated[
    tuple[float, ...] | None,
    Option(
        "normalisation standard deviation, as --mean (default: from the pretrained weights)", nonempty=True, above=0
    ),
]


@dataclass(frozen=True, kw_only=True)
class DataOptions(Config):
    """Where the images are."""

    GROUP: ClassVar[str] = "data"

    data: MaybeFolder = None


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Config):
    """The model, its weights, and its input."""

    GROUP: ClassVar[str] = "model"

    out: Annotated[Path | None, Option("folder of the run (default: runs/NAME-OF-DATA)", "output", often=True)] = None
    model: ModelName = "vit_small_patch16_224"
    model_kwargs: ModelKwargs = ()
    weights: Annotated[Path | None, Option("weights in place of the hub's: file or folder", often=True)] = None
    pretrained: Pretrained = True
    img_size: InputSize = None
    resize_mode: Annotated[
        Literal["crop", "squash", "pad"], Option("fit images of another aspect ratio by cropping, squashing or padding")
    ] = "crop"
    interpolation: Annotated[
        Literal["bicubic", "bilinear", "nearest"] | None,
        Option("resizing filter (default: from the pretrained weights)"),
    ] = None
    mean: _Channels = None
    std: _Deviations = None
    crop_pct: Annotated[
        float | None,
        Option("centre-crop fraction at evaluation (default: from the pretrained weights)", least=0.05, most=1),
    ] = None
    val_split: ValSplit = 0.2
    train_share: TrainShare = 1.0

    @property
    def share(self) -> dict[str, float]:
        """The fraction of the training images, for cards and results; empty where all are used."""
        return {} if self.train_share == 1 else {"train_share": self.train_share}

    def _check_source(self) -> None:
        if self.weights is not None and not self.pretrained:
            raise UsageError("`--weights` gives base weights, --no-pretrained asks for random ones; give one of them")
        self._check_input()

    def _check_input(self) -> None:
        chans = getattr(self, "in_chans", 3)
        for name in ("mean", "std"):
            value = getattr(self, name)
            if value is not None and len(value) not in (1, chans):
                raise UsageError(
                    f"`--{name}` has {len(value)} values; the input has {chans} channels: give one, or one each"
                )
