"""What a run starts from: images, a model, its weights, and how an image becomes the model's input."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vtk.errors import UsageError
from vtk.training.options.checks import require


@dataclass(frozen=True)
class DataOptions:
    """Where the images are."""

    data: Path | None = field(
        default=None,
        metadata={"help": "folder with train/ and val/ holding one folder per class, or with class folders"},
    )


@dataclass(frozen=True)
class SourceOptions:
    """The model, its weights, and its input."""

    out: Path | None = field(default=None, metadata={"help": "folder for the results; default runs/NAME-OF-DATA"})
    model: str = field(default="vit_small_patch16_224", metadata={"help": "name of a timm model"})
    model_kwargs: tuple[str, ...] = field(
        default=(),
        metadata={"help": "arguments for timm's model as key=value, such as depth=6; kept in the pack"},
    )
    weights: Path | None = field(
        default=None,
        metadata={"help": "base weights (.safetensors, .pth or .npz) in place of the hub's"},
    )
    pretrained: bool = field(
        default=True,
        metadata={"help": "start from the hub's weights; --no-pretrained starts from random ones"},
    )
    img_size: int | tuple[int, int] | None = field(
        default=None,
        metadata={"help": "pixels, one side or height width; default the model's own"},
    )
    resize_mode: Literal["crop", "squash", "pad"] = field(
        default="crop",
        metadata={"help": "what happens to images of another aspect ratio"},
    )
    interpolation: Literal["bicubic", "bilinear", "nearest"] | None = field(
        default=None,
        metadata={"help": "default the weights' own"},
    )
    mean: tuple[float, ...] | None = field(
        default=None,
        metadata={"help": "per channel, in 0 to 1; default the weights' own"},
    )
    std: tuple[float, ...] | None = field(
        default=None,
        metadata={"help": "per channel, in 0 to 1; default the weights' own"},
    )
    crop_pct: float | None = field(
        default=None,
        metadata={"help": "share of the image that evaluation keeps; default the weights' own"},
    )
    val_split: float = field(default=0.2, metadata={"help": "share of the images held out when the folder has no val/"})

    def _check_source(self) -> None:
        if self.weights is not None and not self.pretrained:
            raise UsageError("`--weights` gives base weights, --no-pretrained asks for random ones; give one of them")
        self._check_input()

    def _check_input(self) -> None:
        require(0 < self.val_split < 1, "val_split", self.val_split, "between 0 and 1")
        require(self.crop_pct is None or 0.05 <= self.crop_pct <= 1, "crop_pct", self.crop_pct, "from 0.05 to 1")
