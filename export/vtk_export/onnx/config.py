"""Options of the exporters of ONNX files; free of torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.shared import (
    Base,
    CalibrationImages,
    Fuse,
    GraphDtype,
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
from vtk_export.graph.targets import FP8_CAPS, IR_VERSIONS, OLD, Target, check_caps, check_fp8_target, parse_target

RunTime = Annotated[
    str | None,
    Option("the run time that it is for: tritonserver:YY.MM, trt:X.Y or ort:X.Y; limits opset and IR version", "format",
           often=True, nonempty=True),
]  # fmt: skip
"""``--target`` of all exporters of ONNX files."""

IrVersion = Annotated[
    int | None,
    Option("ONNX IR version (default: 10, or what --target takes)", "format", least=IR_VERSIONS.start,
           most=IR_VERSIONS.stop - 1),
]  # fmt: skip


def check_profile(sizes: Sequence[int], static_batch: int | None) -> None:
    """Refuse batch sizes of ``--profile`` that a file of one batch size does not take.

    Raises:
        UsageError: none of them is that batch size.
    """
    if sizes and static_batch is not None and static_batch not in sizes:
        told = ",".join(map(str, sizes))
        raise UsageError(f"`--profile` {told}: the file takes batches of {static_batch} only; give --profile "
                         f"{static_batch}")  # fmt: skip


class ForRunTime:
    """What follows from ``--target`` in a config whose files are written for a run time."""

    if TYPE_CHECKING:  # fields of the config
        target: str | None
        opset: int
        dtype: str

    @property
    def runtime(self) -> Target | None:
        """What ``target`` names."""
        return None if self.target is None else parse_target(self.target)

    @property
    def for_tensorrt(self) -> bool:
        """Whether the graphs have the form that TensorRT's parser takes."""
        return self.runtime is not None and self.runtime.kind == "trt"

    @property
    def file_opset(self) -> int:
        """Opset to write, which is below those of torch's exporter for TensorRT 8.6."""
        return self.graph_opset if self.runtime is None else min(self.graph_opset, self.runtime.opset)

    @property
    def graph_opset(self) -> int:
        """Opset that torch's exporter is asked for: that of the options, or the first that has fp8."""
        return max(self.opset, FP8_CAPS[0]) if getattr(self, "dtype", "") == "fp8" else self.opset


@dataclass(frozen=True, kw_only=True)
class OnnxConfig(ForRunTime, Config):
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
    dtype: GraphDtype = "fp32"
    keep_io_types: KeepIoTypes = False
    int8: Int8 = None
    calibration_images: CalibrationImages = 128
    dynamic_size: Annotated[bool, Option("height and width stay open, for models that take several sizes")] = False
    with_preproc: Annotated[
        bool, Option("resize, crop and normalise in the graph; the input is uint8 RGB of any size", often=True)
    ] = False
    target: RunTime = None
    ir_version: IrVersion = None
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
        if self.dtype == "fp8":
            self._check_fp8()
        if self.dynamic_size and self.with_preproc:
            raise UsageError(
                "`--with-preproc` brings images to the model's own size, --dynamic-size opens it; leave one out"
            )
        self._check_target()
        if self.softmax and self.output == "features":
            raise UsageError("`--softmax` is of logits, `--output features` has none; give --output both or logits")

    def _check_fp8(self) -> None:
        if self.data is None:
            raise UsageError("`--dtype fp8` is calibrated on training images and judged on held-out ones; give --data "
                             "FOLDER")  # fmt: skip
        if self.dynamic_size:
            raise UsageError(
                "`--dtype fp8` is calibrated at the model's own size, --dynamic-size opens it; leave one out"
            )
        if self.output == "features":
            raise UsageError("`--dtype fp8` is judged by the classes, `--output features` has none; give --output both")
        if self.ir < FP8_CAPS[1]:
            told = self.target if self.ir_version is None else f"--ir-version {self.ir_version}"
            raise UsageError(f"fp8 came with IR version {FP8_CAPS[1]}, and {told} means {self.ir}; leave that out, or "
                             "use --dtype fp16")  # fmt: skip
        if self.runtime is not None and self.runtime != OLD:
            check_fp8_target(self.runtime)

    def _check_target(self) -> None:
        target = self.runtime
        if target is None:
            return
        check_caps(target, self.opset, self.ir_version)
        if target.kind != "trt":
            return
        if target == OLD and self.dtype != "fp32":
            raise UsageError(f"{target.text} lowers what --dtype {self.dtype} keeps in fp32, its networks not being "
                             "strongly typed; give --dtype fp32, or trt:10.x")  # fmt: skip
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
        return self.ir_version or written_ir(self.runtime)

    @property
    def rest(self) -> Literal["fp32", "fp16", "bf16"]:
        """Type of inputs, outputs, and of all but the wide products of fp8."""
        return "fp16" if self.dtype == "fp8" else self.dtype


def written_ir(target: Target | None) -> int:
    """Return the IR version of a file for a run time."""
    return IR_VERSIONS.stop - 1 if target is None else target.ir_version


@dataclass(frozen=True, kw_only=True)
class OnnxCommand(OnnxConfig, SourceOptions):
    """``vtk export onnx``: what to open, and what to make of it."""


@dataclass(frozen=True, kw_only=True)
class TasksConfig(ForRunTime, Config):
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
    target: RunTime = None
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
        if self.runtime is not None:
            check_caps(self.runtime, self.opset, None)
        if self.fuse and self.form != "files":
            raise UsageError(f"`--fuse` is for --form files, `--form` is {self.form}: weights that each image gathers "
                             "cannot be folded; leave it out")  # fmt: skip

    @property
    def ir(self) -> int:
        """IR version to write."""
        return written_ir(self.runtime)


@dataclass(frozen=True, kw_only=True)
class TasksCommand(TasksConfig):
    """``vtk export tasks``: what to open, and what to make of it."""

    packs: Annotated[
        tuple[Path, ...],
        Option("two or more packs or run folders, each PACK or NAME=PACK", "source", often=True),
    ] = ()
    base: Base = None
