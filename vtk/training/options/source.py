"""What a run starts from: images, a model, its weights, and how an image becomes the model's input."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vtk.errors import UsageError
from vtk.training.options.checks import require
from vtk.training.spec import TaskSpec, parse_starts, parse_tasks


@dataclass(frozen=True)
class SourceOptions:
    """Images and weights."""

    data: Path | None = field(
        default=None,
        metadata={"help": "folder with train/ and val/ holding one folder per class, or with class folders"},
    )
    tasks: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "in place of DATA, once for each task: NAME=FOLDER or NAME=FOLDER@SIZE; all of them are trained "
            "together over one set of frozen weights",
            "flag": "task",
            "metavar": "NAME=FOLDER[@SIZE]",
        },
    )
    sampling: float = field(
        default=1.0,
        metadata={
            "help": "of several tasks: temperature of how often each is drawn; 1 shows every image once an epoch, more "
            "shows small tasks more often, up to equally often"
        },
    )
    init_from: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "start from a trained pack in place of the base, also at another size; with --task give NAME=PACK, "
            "once for each",
            "flag": "init-from",
            "metavar": "PACK",
        },
    )
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
        require(self.sampling >= 1, "sampling", self.sampling, "1 or above")
        require(0 < self.val_split < 1, "val_split", self.val_split, "between 0 and 1")
        require(self.crop_pct is None or 0.05 <= self.crop_pct <= 1, "crop_pct", self.crop_pct, "from 0.05 to 1")

    def _check_tasks(self) -> tuple[TaskSpec, ...]:
        """Return the tasks of a run of several; none for a run of one."""
        specs = parse_tasks(self.tasks)
        parse_starts(self.init_from, [spec.name for spec in specs])
        if specs and self.data is not None:
            raise UsageError(f"{self.data} and `--task` {self.tasks[0]}: give one folder, or tasks, not both")
        if len(specs) == 1:
            raise UsageError(f"`--task` {self.tasks[0]} is alone; give another, or its folder without --task")
        if not specs and self.sampling != 1.0:
            raise UsageError("`--sampling` says how often each of several tasks is drawn; give --task")
        return specs
