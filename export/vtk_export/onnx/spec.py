"""The options that the builder and the gate of ONNX files need, resolved from an exporter's config; free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vtk_export.targets import Target


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """The graph of a file.

    Attributes:
        opset: that torch's exporter is asked for.
        file_opset: that the file has; a lower one is for TensorRT 8.6.
        ir_version: of the file.
        dtype: precision; the rest of an fp8 file is fp16.
        static_batch: fixed batch size, None for any.
        keep_io_types: inputs and outputs stay fp32.
        int8: how products are quantised, None for not at all.
        max_drop: most images, in percent, whose class static int8 may change; None: as many as it does.
        dynamic_size: height and width stay open.
        softmax: the output is ``probabilities``.
        output: what the file gives.
        fuse: of `vtk_export.graph.convert.choose_form`.
        target: ``--target`` as it was given, "" without.
        runtime: what that names.
        names: of inputs and outputs in the file, by the toolkit's own.
    """

    opset: int
    file_opset: int
    ir_version: int
    dtype: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    static_batch: int | None = None
    keep_io_types: bool = False
    int8: Literal["dynamic", "static"] | None = None
    max_drop: float | None = None
    dynamic_size: bool = False
    softmax: bool = False
    output: Literal["logits", "features", "both"] = "logits"
    fuse: bool | None = None
    target: str = ""
    runtime: Target | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def rest(self) -> Literal["fp32", "fp16", "bf16"]:
        """Type of inputs, outputs, and of all but the wide products of fp8."""
        return "fp16" if self.dtype == "fp8" else self.dtype

    @property
    def for_tensorrt(self) -> bool:
        """Whether the graph has the form that TensorRT's parser takes."""
        return self.runtime is not None and self.runtime.kind == "trt"


@dataclass(frozen=True, kw_only=True)
class GateSpec:
    """How a file is run and judged.

    Attributes:
        threads: CPU threads, None for all cores.
        seed: of random images.
        images: of ``--data`` that judge a file of reduced precision, at most.
        calibration_images: of ``--data`` that calibrate one, at most.
        unverified: keep a file that nothing here can run.
        verify_with: back-ends that verify it besides ONNX Runtime's.
    """

    threads: int | None = None
    seed: int = 0
    images: int = 256
    calibration_images: int = 128
    unverified: bool = False
    verify_with: tuple[str, ...] = ()
