"""Options of ``vtk eval`` and ``vtk predict``; imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.shared import (
    Base,
    Folder,
    Fp8Images,
    MaybeOut,
    NamedSource,
    Overwrite,
    Reference,
    RunBackend,
    RunBatch,
    RunDevice,
    RunPrecision,
    Split,
    Threads,
    Trust,
    Workers,
)

FP8_BACKENDS = ("fused", "fused+graph", "fused+nograph")
"""Those that have fp8."""

_Table = Annotated[
    Path | None, Option("CSV file of paths, labels and scores (default: they are printed)", "output", often=True)
]


@dataclass(frozen=True, kw_only=True)
class RunOptions(Config):
    """How a model is run; what is left out comes from its card."""

    GROUP: ClassVar[str] = "running"

    backend: RunBackend = None
    precision: RunPrecision = None
    device: RunDevice = None
    batch_size: RunBatch = None
    threads: Threads = None


@dataclass(frozen=True, kw_only=True)
class EvalConfig(RunOptions):
    """How to evaluate; what is left out comes from the card, so that a pack gives its training run's metric.

    Raises:
        UsageError: a value is out of range.
    """

    data: Folder
    split: Split = "val"
    reference: Reference = None
    workers: Workers = None
    out: MaybeOut = None
    overwrite: Overwrite = False


@dataclass(frozen=True, kw_only=True)
class PredictConfig(RunOptions):
    """How to label images.

    Raises:
        UsageError: a value is out of range.
    """

    images: Annotated[Path, Option("an image, or a folder of images at any depth", "data", often=True)]
    top_k: Annotated[int, Option("labels per image, most likely first", "output", often=True, least=1)] = 3
    threshold: Annotated[
        float | None,
        Option("several labels: give those of at least this probability (default: 0.5)", "output", often=True, least=0,
               most=1),
    ] = None  # fmt: skip
    out: _Table = None
    overwrite: Overwrite = False
    data: Fp8Images = None

    def check(self) -> None:
        """Refuse fp8 without images, and images that nothing needs."""
        check_fp8(self.precision, self.data)


def check_fp8(precision: str | None, data: Path | None) -> None:
    """Refuse fp8 without the images that calibrate and judge it, and such images for nothing.

    Raises:
        UsageError: says which.
    """
    if precision == "fp8" and data is None:
        raise UsageError("`--precision fp8` is calibrated on training images and judged on held-out ones; give --data "
                         "FOLDER")  # fmt: skip
    if data is not None and precision != "fp8":
        raise UsageError(f"`--data` {data} calibrates --precision fp8, which was not given; leave it out")


@dataclass(frozen=True, kw_only=True)
class EvalCommand(EvalConfig):
    """``vtk eval``: what to open, and how to evaluate it."""

    source: NamedSource
    base: Base = None
    trust: Trust = False


@dataclass(frozen=True, kw_only=True)
class PredictCommand(PredictConfig):
    """``vtk predict``: what to open, and what to label with it."""

    source: NamedSource
    base: Base = None
    trust: Trust = False
