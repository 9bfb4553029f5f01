"""Options of ``vtk embed``; imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from vtk.errors import UsageError
from vtk.evaluation.config import RunOptions
from vtk.options import Option
from vtk.options.option import show
from vtk.options.shared import Base, ImgSize, Overwrite, Pretrained, Trust, Workers

SUFFIXES = (".parquet", ".npz", ".csv")
"""Of the tables that can be written."""


@dataclass(frozen=True, kw_only=True)
class EmbedConfig(RunOptions):
    """How to embed images.

    Raises:
        UsageError: a value is out of range, or ``out`` has an unknown suffix.
    """

    images: Annotated[
        Path, Option("an image, a folder of images at any depth, or a table of labels", "data", often=True)
    ]
    out: Annotated[Path, Option("table to write: .parquet, .npz or .csv", "output", often=True)]
    split: Annotated[
        Literal["val", "train", "all"] | None,
        Option("part of the images, as in `vtk eval` (default: every image that is there)", "data", often=True),
    ] = None
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        Option("precision of the model (default: the training run's); features are written in fp32", "running"),
    ] = None
    normalize: Annotated[
        bool, Option("divide each row by its L2 norm, so that dot products are cosines", "output", often=True)
    ] = False
    labels: Annotated[
        bool,
        Option("column `label`: the class folder, or the table's label", "output", off="no column `label`"),
    ] = True
    workers: Workers = None
    overwrite: Overwrite = False

    def check(self) -> None:
        """Refuse a table of an unknown format."""
        if self.out.suffix.lower() not in SUFFIXES:
            raise UsageError(f"`--out` is {show(str(self.out))}; allowed is a name that ends in {', '.join(SUFFIXES)}")


@dataclass(frozen=True, kw_only=True)
class EmbedCommand(EmbedConfig):
    """``vtk embed``: the model, and the images to embed."""

    source: Annotated[
        str,
        Option("task pack, run folder, .safetensors, .onnx with features, or timm model name", "source", often=True),
    ]
    base: Base = None
    weights: Annotated[
        Path | None, Option("timm name: weights in place of the hub's, a file or folder", "source", often=True)
    ] = None
    pretrained: Pretrained = True
    img_size: ImgSize = None
    trust: Trust = False
