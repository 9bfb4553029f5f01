"""Options of ``vtk eval`` and ``vtk predict``; imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.shared import (
    AutoThreshold,
    Base,
    Cpus,
    Folder,
    Fp8Images,
    MaybeOut,
    NamedSource,
    Overwrite,
    Reference,
    Risk,
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
"""Back-ends that support fp8."""

_Table = Annotated[Path | None, Option("CSV file of paths, labels and scores (default: printed)", "output", often=True)]


@dataclass(frozen=True, kw_only=True)
class RunOptions(Config):
    """How a model is run; options that are not given come from its card."""

    GROUP: ClassVar[str] = "running"

    backend: RunBackend = None
    precision: RunPrecision = None
    device: RunDevice = None
    batch_size: RunBatch = None
    threads: Threads = None
    cpus: Cpus = None


@dataclass(frozen=True, kw_only=True)
class EvalConfig(RunOptions):
    """How to evaluate; options that are not given come from the card, so that a pack reproduces its run's metric.

    Raises:
        UsageError: a value is out of range.
    """

    data: Folder
    split: Split = "val"
    reference: Reference = None
    workers: Workers = None
    threshold: AutoThreshold = None
    risk: Risk = None
    restrict: Annotated[bool, Option("choose among the classes of DATA, as ImageNet-A and -R do", "data")] = False
    corrupted: Annotated[
        bool, Option("DATA is ImageNet-C's CORRUPTION/SEVERITY/CLASS folders, or CIFAR-C's .npy files", "data")
    ] = False
    baseline: Annotated[
        str | None,
        Option("--corrupted: errors that the mCE divides by, alexnet or another model's corruptions.json", "data",
               nonempty=True),
    ] = None  # fmt: skip
    out: MaybeOut = None
    overwrite: Overwrite = False

    def check(self) -> None:
        """Refuse a risk without ``--threshold auto``, and what does not go with fewer classes or corrupted images."""
        check_risk(self.threshold, self.risk)
        if self.restrict and self.threshold is not None:
            raise UsageError(
                "`--threshold auto` is chosen for answers among all classes, and --restrict leaves fewer; leave one out"
            )
        if not self.corrupted:
            if self.baseline is not None:
                raise UsageError("`--baseline` is for --corrupted, which was not given; add it, or leave it out")
            return
        if self.split == "train":
            raise UsageError("`--split train`: --corrupted evaluates a whole test set; leave it out")
        for name in ("reference", "threshold"):
            if getattr(self, name) is not None:
                raise UsageError(f"`--{name}` is not for --corrupted; leave one of them out")
        if self.precision == "fp8":
            raise UsageError("`--precision fp8` is calibrated on images that --corrupted lacks; give another")


@dataclass(frozen=True, kw_only=True)
class PredictConfig(RunOptions):
    """How to label images.

    Raises:
        UsageError: a value is out of range.
    """

    images: Annotated[Path, Option("an image, or a folder of images at any depth", "data", often=True)]
    top_k: Annotated[int, Option("labels per image, most likely first", "output", often=True, least=1)] = 3
    threshold: Annotated[
        float | Literal["auto"] | None,
        Option('auto: "unknown" below a score chosen for --risk; multi-label: least probability (0.5)', "output",
               often=True, least=0, most=1),
    ] = None  # fmt: skip
    risk: Risk = None
    out: _Table = None
    overwrite: Overwrite = False
    data: Fp8Images = None

    def check(self) -> None:
        """Refuse fp8 without images, images without fp8, and a risk without ``--threshold auto``."""
        check_fp8(self.precision, self.data)
        check_risk(self.threshold, self.risk)


def check_risk(threshold: float | str | None, risk: float | None) -> None:
    """Refuse ``--risk`` without ``--threshold auto``.

    Raises:
        UsageError: says what to add.
    """
    if risk is not None and threshold != "auto":
        raise UsageError(f"`--risk` {risk:g} is for --threshold auto, which was not given; add it, or leave --risk out")


def check_fp8(precision: str | None, data: Path | None) -> None:
    """Refuse fp8 without images to calibrate and verify it, and such images without fp8.

    Raises:
        UsageError: one is given without the other.
    """
    if precision == "fp8" and data is None:
        raise UsageError(
            "`--precision fp8` is calibrated on training images and verified on held-out ones; give --data FOLDER"
        )  # fmt: skip
    if data is not None and precision != "fp8":
        raise UsageError(f"`--data` {data} is only for --precision fp8, which was not given; leave it out")


@dataclass(frozen=True, kw_only=True)
class EvalCommand(EvalConfig):
    """``vtk eval``: the model, and how to evaluate it."""

    source: NamedSource
    base: Base = None
    trust: Trust = False


@dataclass(frozen=True, kw_only=True)
class PredictCommand(PredictConfig):
    """``vtk predict``: the model, and the images to label."""

    source: NamedSource
    base: Base = None
    trust: Trust = False
