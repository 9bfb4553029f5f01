"""Options that several exporters share, and the properties that follow from ``--target``; free of torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.shared import (
    CalibrationImages,
    Fuse,
    GraphDtype,
    JudgeImages,
    KeepIoTypes,
    Opset,
    Seed,
    Split,
    StaticBatch,
    Threads,
    Unverified,
    VerifyData,
)
from vtk_export.targets import FP8_CAPS, IR_VERSIONS, Target, parse_target

RunTime = Annotated[
    str | None,
    Option("target runtime: tritonserver:YY.MM, trt:X.Y or ort:X.Y; limits opset and IR version", "format",
           often=True, nonempty=True),
]  # fmt: skip
"""``--target`` of all exporters of ONNX files."""

IrVersion = Annotated[
    int | None,
    Option("ONNX IR version (default: 10, or what --target takes)", "format", least=IR_VERSIONS.start,
           most=IR_VERSIONS.stop - 1),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Config):
    """Options of every exporter of files."""

    GROUP: ClassVar[str] = "format"

    fuse: Fuse = None
    split: Split = None
    seed: Seed = 0
    threads: Threads = None


@dataclass(frozen=True, kw_only=True)
class GraphConfig(ExportConfig):
    """Options of exporters of ONNX files."""

    opset: Opset = 18
    target: RunTime = None
    static_batch: StaticBatch = None

    def check_profile(self, sizes: Sequence[int]) -> None:
        """Refuse batch sizes of ``--profile`` that a file of one batch size does not take.

        Raises:
            UsageError: none of them is that batch size.
        """
        if sizes and self.static_batch is not None and self.static_batch not in sizes:
            given = ",".join(map(str, sizes))
            raise UsageError(f"`--profile` {given}: the file takes batches of {self.static_batch} only; give --profile "
                             f"{self.static_batch}")  # fmt: skip

    @property
    def runtime(self) -> Target | None:
        """The runtime that ``target`` names."""
        return None if self.target is None else parse_target(self.target)

    @property
    def for_tensorrt(self) -> bool:
        """Whether the graph has the form that TensorRT's parser takes."""
        return self.runtime is not None and self.runtime.kind == "trt"

    @property
    def graph_opset(self) -> int:
        """Opset that torch's exporter is asked for."""
        return self.opset

    @property
    def file_opset(self) -> int:
        """Opset of the file; for TensorRT 8.6 it is lower than any of torch's exporter."""
        return self.graph_opset if self.runtime is None else min(self.graph_opset, self.runtime.opset)

    @property
    def ir(self) -> int:
        """ONNX IR version to write."""
        return IR_VERSIONS.stop - 1 if self.runtime is None else self.runtime.ir_version


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(GraphConfig):
    """Options of exporters of one graph in any precision."""

    dtype: GraphDtype = "fp32"
    keep_io_types: KeepIoTypes = False
    calibration_images: CalibrationImages = 128
    data: VerifyData = None
    unverified: Unverified = False
    images: JudgeImages = 256

    @property
    def graph_opset(self) -> int:
        """Opset that torch's exporter is asked for: that of the options, or the first that has fp8."""
        return max(self.opset, FP8_CAPS[0]) if self.dtype == "fp8" else self.opset

    @property
    def rest(self) -> Literal["fp32", "fp16", "bf16"]:
        """Type of inputs, outputs, and of all but the wide products of fp8."""
        return "fp16" if self.dtype == "fp8" else self.dtype
