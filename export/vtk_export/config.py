"""Options of the exporters of ONNX files; free of torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.shared import (
    Base,
    CalibrationImages,
    Dtype,
    Fuse,
    Int8,
    JudgeImages,
    KeepIoTypes,
    Opset,
    Out,
    Overwrite,
    ProfileSizes,
    Seed,
    Softmax,
    SourceOptions,
    Split,
    StaticBatch,
    Threads,
    Unverified,
    VerifyData,
    VerifyDataOf,
)
from vtk_export.targets import IR_VERSIONS, parse_target

OPSETS = range(18, 23)
"""Opsets of the standard ONNX domain that torch's exporter writes and that are tested here."""


def check_profile(sizes: Sequence[int], static_batch: int | None) -> None:
    """Refuse batch sizes of ``--profile`` that a file of one batch size does not take.

    Raises:
        UsageError: none of them is that batch size.
    """
    if sizes and static_batch is not None and static_batch not in sizes:
        told = ",".join(map(str, sizes))
        raise UsageError(f"`--profile` {told}: the file takes batches of {static_batch} only; give --profile "
                         f"{static_batch}")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OnnxConfig(Config):
    """What ONNX file is made of a model, where, and how it is judged.

    Raises:
        UsageError: a value is out of range, or two values contradict each other.
    """

    GROUP: ClassVar[str] = "format"

    out: Out
    opset: Opset = 18
    static_batch: StaticBatch = None
    data: VerifyData = None
    split: Split = None
    fuse: Fuse = None
    dtype: Dtype = "fp32"
    keep_io_types: KeepIoTypes = False
    int8: Int8 = None
    calibration_images: CalibrationImages = 128
    dynamic_size: Annotated[bool, Option("height and width stay open, for models that take several sizes")] = False
    with_preproc: Annotated[
        bool, Option("resize, crop and normalise in the graph; the input is uint8 RGB of any size", often=True)
    ] = False
    target: Annotated[
        str | None,
        Option("limit opset and IR version to tritonserver:YY.MM, trt:X.Y or ort:X.Y", often=True, nonempty=True),
    ] = None
    ir_version: Annotated[
        int | None,
        Option("ONNX IR version (default: 10, or what --target takes)", least=IR_VERSIONS.start,
               most=IR_VERSIONS.stop - 1),
    ] = None  # fmt: skip
    softmax: Softmax = False
    output: Annotated[
        Literal["logits", "features", "both"], Option("features: the classifier's input, (batch, channels)")
    ] = "logits"
    unverified: Unverified = False
    images: JudgeImages = 256
    seed: Seed = 0
    threads: Threads = None
    profile: ProfileSizes = ()
    overwrite: Overwrite = False

    def check(self) -> None:
        """Refuse options that contradict each other."""
        check_profile(self.profile, self.static_batch)
        if self.profile and self.output == "features":
            raise UsageError("`--profile` compares logits, and this file gives no logits; leave it out, or give "
                             "--output both")  # fmt: skip
        if self.keep_io_types and self.dtype == "fp32":
            raise UsageError("`--keep-io-types` is for --dtype fp16 or bf16; an fp32 file has fp32 inputs and outputs")
        if self.int8 and self.dtype != "fp32":
            raise UsageError(f"`--int8` leaves the rest in fp32, so --dtype {self.dtype} contradicts it; leave out one")
        if self.int8 == "static" and self.data is None:
            raise UsageError("`--int8 static` measures the activations' ranges on images; give --data FOLDER")
        if self.dynamic_size and self.with_preproc:
            raise UsageError(
                "`--with-preproc` brings images to the model's own size, --dynamic-size opens it; leave one out"
            )
        self._check_target()
        if self.softmax and self.output == "features":
            raise UsageError("`--softmax` is of logits, `--output features` has none; give --output both or logits")

    def _check_target(self) -> None:
        if self.target is None:
            return
        target = parse_target(self.target)
        for flag, given, highest in (
            ("opset", self.opset, target.opset), ("ir-version", self.ir_version or 0, target.ir_version)
        ):  # fmt: skip
            if given > highest:
                raise UsageError(f"`--{flag}` {given} is more than {target.text} takes; give at most {highest}")
        if target.kind != "trt":
            return
        if self.int8 == "dynamic":
            raise UsageError(f"{target.text} cannot run `--int8 dynamic`, whose ranges are found at every run; give "
                             "--int8 static")  # fmt: skip
        if self.with_preproc:
            raise UsageError(
                f"{target.text} cannot resize with antialiasing, so --with-preproc would change what the model sees; "
                "leave it out, and prepare images in the client or in a server ensemble"
            )

    @property
    def ir(self) -> int:
        """IR version to write."""
        return self.ir_version or (parse_target(self.target).ir_version if self.target else IR_VERSIONS.stop - 1)


@dataclass(frozen=True, kw_only=True)
class OnnxCommand(OnnxConfig, SourceOptions):
    """``vtk export onnx``: what to open, and what to make of it."""


@dataclass(frozen=True, kw_only=True)
class TasksConfig(Config):
    """What files are made of several packs of one base, where, and how they are verified.

    Raises:
        UsageError: a value is out of range, or two values contradict each other.
    """

    GROUP: ClassVar[str] = "format"

    out: Out
    form: Annotated[
        Literal["files", "gathered", "both"],
        Option("files: one file per task, weights shared; gathered: one file for mixed batches", often=True),
    ] = "files"
    opset: Opset = 18
    static_batch: StaticBatch = None
    data: VerifyDataOf = ()
    split: Split = None
    fuse: Fuse = None
    seed: Seed = 0
    threads: Threads = None
    profile: ProfileSizes = ()
    overwrite: Overwrite = False

    def check(self) -> None:
        """Refuse options that contradict each other."""
        check_profile(self.profile, self.static_batch)
        if self.fuse and self.form != "files":
            raise UsageError(f"`--fuse` is for --form files, `--form` is {self.form}: weights that each image gathers "
                             "cannot be folded; leave it out")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TasksCommand(TasksConfig):
    """``vtk export tasks``: what to open, and what to make of it."""

    packs: Annotated[
        tuple[Path, ...],
        Option("two or more packs or run folders, each PACK or NAME=PACK", "source", often=True),
    ] = ()
    base: Base = None
