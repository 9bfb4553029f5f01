"""Options of ``vtk export tensorrt``; free of torch and onnx."""

import re
from dataclasses import dataclass
from typing import Annotated

from vtk.errors import UsageError
from vtk.options import Option
from vtk.options.shared import MaybeOut, Overwrite, ProfileSizes, SourceOptions
from vtk_export.onnx.config import derive
from vtk_export.onnx.spec import GateSpec, GraphSpec
from vtk_export.options import PrecisionConfig
from vtk_export.targets import OLD, OPSETS, Target, parse_target, tensorrt_of
from vtk_export.tensor_names import InputName, OutputName

__all__ = ["OLD", "TensorrtCommand", "TensorrtConfig", "parse_version"]

_ANY = "10.x"


def parse_version(text: str) -> Target:
    """Parse ``10.3``, ``10.x`` or ``10`` (for every 10), the same with 11, and ``8.6``.

    Raises:
        UsageError: another version, or one whose needs are not known.
    """
    match = re.fullmatch(r"(8|10|11)(?:\.(x|\d+)(?:\.\d+)*)?", text)
    if match is None:
        raise UsageError(f"`--trt` {text!r} is not a known TensorRT version; give 10.x, 11.x, a version such as "
                         "10.3, or 8.6")  # fmt: skip
    major, minor = match[1], match[2] or "x"
    if major == "8":
        if minor != "6":
            raise UsageError(f"`--trt` {text}: of TensorRT 8 only 8.6 has LayerNormalization; give 8.6, 10.x or 11.x")
        return OLD
    return parse_target(f"trt:{major}.{'0' if minor == 'x' else minor}", "--trt")


@dataclass(frozen=True, kw_only=True)
class TensorrtConfig(PrecisionConfig):
    """Options of the TensorRT export of one model.

    Raises:
        UsageError: a value is out of range, or two values contradict each other.
    """

    out: MaybeOut = None
    trt: Annotated[
        str, Option("TensorRT version the engine is built with: 10.x, 11.x, such as 10.3, or 8.6 (fp32)", often=True)
    ] = _ANY
    min: Annotated[int, Option("smallest batch size", often=True)] = 1
    opt: Annotated[int, Option("batch size that the engine is tuned for", often=True)] = 8
    max: Annotated[int, Option("largest batch size", often=True)] = 32
    tf32: Annotated[
        bool, Option("round fp32 products to TF32", off="full fp32 products; TensorRT would round them to TF32")
    ] = True
    workspace: Annotated[int, Option("GPU memory for building and running, in MiB", least=1)] = 4096
    build: Annotated[bool, Option("also build the engine, if TensorRT is installed", often=True)] = False
    input_name: InputName = ()
    output_name: OutputName = ()
    profile: ProfileSizes = ()
    overwrite: Overwrite = False

    def check(self) -> None:
        """Refuse options that contradict each other."""
        target = self.runtime
        if self.out is None:
            raise UsageError("`--out` is missing; give a folder, or --lint to look at an .onnx only")
        if self.static_batch is None:
            if not 1 <= self.min <= self.opt <= self.max:
                raise UsageError(f"`--min` {self.min}, `--opt` {self.opt}, `--max` {self.max}: required is "
                                 "1 ≤ min ≤ opt ≤ max")  # fmt: skip
        elif (self.min, self.opt, self.max) != (1, 8, 32):
            raise UsageError("`--static-batch` fixes the batch size; leave out --min, --opt and --max")
        if target is OLD and self.dtype != "fp32":
            raise UsageError(f"`--trt 8.6` lowers what --dtype {self.dtype} keeps in fp32, its networks not being "
                             "strongly typed; give --dtype fp32, or --trt 10.x")  # fmt: skip
        if target is OLD and self.opset != OPSETS.start:
            raise UsageError(f"`--opset` {self.opset} cannot be lowered to the 17 of TensorRT 8.6; leave it out")
        derive(self, target=self.runtime.text)  # has its own checks

    @property
    def runtime(self) -> Target:
        """The version of TensorRT, with its caps."""
        if self.target is None:
            return parse_version(self.trt)
        if self.trt != _ANY:
            raise UsageError(f"`--trt` {self.trt} and `--target` {self.target} both name a version; leave out one")
        return tensorrt_of(parse_target(self.target))

    @property
    def shapes(self) -> tuple[int, int, int]:
        """Smallest, optimum and largest batch size."""
        return (self.min, self.opt, self.max) if self.static_batch is None else (self.static_batch,) * 3

    @property
    def graph(self) -> GraphSpec:
        """The ONNX file to be written, for the builder and the gate."""
        return derive(self, target=self.runtime.text).graph

    @property
    def gate(self) -> GateSpec:
        """How the ONNX file is run and judged."""
        return derive(self, target=self.runtime.text).gate


@dataclass(frozen=True, kw_only=True)
class TensorrtCommand(TensorrtConfig, SourceOptions):
    """``vtk export tensorrt``: the source and the options, or an .onnx file to lint."""

    lint: Annotated[bool, Option("only report what TensorRT refuses or runs slowly in an .onnx", often=True)] = False

    def check(self) -> None:
        """Refuse options that contradict each other."""
        if not self.lint:
            super().check()
        elif self.out is not None or self.build or self.profile:
            raise UsageError("`--lint` writes, builds and measures nothing; leave out --out, --build and --profile")
        else:
            self.runtime  # noqa: B018 - refuses what is not known
