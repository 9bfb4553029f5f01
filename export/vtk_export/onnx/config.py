"""Options of ``vtk export onnx``; free of torch."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from vtk.errors import UsageError
from vtk.evaluation.config import check_risk
from vtk.options import Config, Option
from vtk.options.shared import (
    AutoThreshold,
    Int8,
    MaxDrop,
    Out,
    Overwrite,
    ProfileSizes,
    Risk,
    Softmax,
    SourceOptions,
)
from vtk_export.onnx.spec import GateSpec, GraphSpec
from vtk_export.options import IrVersion, PrecisionConfig
from vtk_export.targets import FP8_CAPS, OLD, check_caps, check_fp8_target
from vtk_export.tensor_names import InputName, OutputName, check_names, parse_names


@dataclass(frozen=True, kw_only=True)
class OnnxConfig(PrecisionConfig):
    """Options of the ONNX export of one model.

    Raises:
        UsageError: a value is out of range, or two values contradict each other.
    """

    out: Out
    int8: Int8 = None
    max_drop: MaxDrop = None
    dynamic_size: Annotated[bool, Option("dynamic height and width, for models that accept several sizes")] = False
    with_preproc: Annotated[
        bool, Option("preprocessing in the graph; the input is uint8 RGB of any size", often=True)
    ] = False
    ir_version: IrVersion = None
    softmax: Softmax = False
    threshold: AutoThreshold = None
    risk: Risk = None
    output: Annotated[
        Literal["logits", "features", "both"], Option("features: the classifier's input, (batch, channels)")
    ] = "logits"
    input_name: InputName = ()
    output_name: OutputName = ()
    verify_with: Annotated[
        tuple[str, ...],
        Option("also verify with: openvino (in fp32, and bf16 where the processor has it)", "verification",
               among=("openvino",), unique=True),
    ] = ()  # fmt: skip
    profile: ProfileSizes = ()
    overwrite: Overwrite = False

    def check(self) -> None:
        """Refuse options that contradict each other."""
        self.check_profile(self.profile)
        if self.profile and self.output == "features":
            raise UsageError("`--profile` compares logits, and this file gives no logits; leave it out, or give "
                             "--output both")  # fmt: skip
        if self.keep_io_types and self.dtype == "fp32":
            raise UsageError("`--keep-io-types` is for --dtype fp16 or bf16; an fp32 file has fp32 inputs and outputs")
        if self.int8 and self.dtype != "fp32":
            raise UsageError(f"`--int8` leaves the rest in fp32, which --dtype {self.dtype} contradicts; leave one out")
        if self.verify_with and self.dtype != "fp32":
            raise UsageError(f"`--verify-with` openvino runs fp32 and int8 files and rounds to bf16 itself; --dtype "
                             f"{self.dtype} contradicts that: leave one out")  # fmt: skip
        if self.int8 == "static" and self.data is None:
            raise UsageError("`--int8 static` measures the activations' ranges on images; give --data FOLDER")
        if self.max_drop is not None and self.int8 != "static":
            raise UsageError("`--max-drop` says how much --int8 static may change; add that, or leave it out")
        if self.max_drop is not None and self.output == "features":
            raise UsageError("`--max-drop` counts classes, and `--output features` has none; give --output both")
        if self.dtype == "fp8":
            self._check_fp8()
        if self.dynamic_size and self.with_preproc:
            raise UsageError(
                "`--with-preproc` resizes images to the model's size, which --dynamic-size leaves open; leave one out"
            )
        self._check_target()
        check_risk(self.threshold, self.risk)
        if self.threshold and self.output == "features":
            raise UsageError(
                "`--threshold` applies to logits, which `--output features` lacks; give --output both or logits"
            )
        self.names  # noqa: B018 - refuses what the file does not have
        if self.softmax and self.output == "features":
            raise UsageError(
                "`--softmax` applies to logits, which `--output features` lacks; give --output both or logits"
            )

    def _check_fp8(self) -> None:
        if self.data is None:
            raise UsageError("`--dtype fp8` is calibrated on training images and judged on held-out ones; give --data "
                             "FOLDER")  # fmt: skip
        if self.dynamic_size:
            raise UsageError(
                "`--dtype fp8` is calibrated at the model's size, which --dynamic-size leaves open; leave one out"
            )
        if self.output == "features":
            raise UsageError("`--dtype fp8` is judged by the classes, `--output features` has none; give --output both")
        if self.ir < FP8_CAPS[1]:
            given = self.target if self.ir_version is None else f"--ir-version {self.ir_version}"
            raise UsageError(f"fp8 needs IR version {FP8_CAPS[1]}, and {given} gives {self.ir}; leave that out, or "
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
            raise UsageError(f"{target.text} cannot run `--int8 dynamic`, which computes ranges at every run; give "
                             "--int8 static")  # fmt: skip
        if self.with_preproc:
            raise UsageError(
                f"{target.text} cannot resize with antialiasing, so --with-preproc would change what the model sees; "
                "leave it out, and prepare images in the client or in a server ensemble"
            )

    @property
    def names(self) -> dict[str, str]:
        """Names of the file's input and outputs that differ from the toolkit's own."""
        first = "probabilities" if self.softmax else "logits"
        outputs = {"logits": (first,), "features": ("features",), "both": (first, "features")}[self.output]
        image = "images" if self.with_preproc else "pixel_values"
        names = parse_names(self.input_name, self.output_name, image=image, answer=outputs[0])
        return check_names(names, (image,), (*outputs, *(("unknown",) if self.threshold else ())))

    @property
    def ir(self) -> int:
        """ONNX IR version to write."""
        return self.ir_version or super().ir

    @property
    def graph(self) -> GraphSpec:
        """The file to be written, for the builder and the gate."""
        return GraphSpec(
            opset=self.graph_opset, file_opset=self.file_opset, ir_version=self.ir, dtype=self.dtype,
            static_batch=self.static_batch, keep_io_types=self.keep_io_types, int8=self.int8, max_drop=self.max_drop,
            dynamic_size=self.dynamic_size, softmax=self.softmax, output=self.output, fuse=self.fuse,
            target=self.target or "", runtime=self.runtime, names=self.names,
        )  # fmt: skip

    @property
    def gate(self) -> GateSpec:
        """How the file is run and judged."""
        return GateSpec(
            threads=self.threads, seed=self.seed, images=self.images, calibration_images=self.calibration_images,
            unverified=self.unverified, verify_with=self.verify_with,
        )  # fmt: skip


def derive(config: Config, **others: object) -> OnnxConfig:
    """Return the options of the ONNX file that another exporter writes.

    Args:
        config: its options; those that an `OnnxConfig` has too are taken over.
        others: options that take their place.

    Raises:
        UsageError: as of `OnnxConfig`.
    """
    names = {f.name for f in dataclasses.fields(OnnxConfig)} & {f.name for f in dataclasses.fields(config)}
    values: dict[str, Any] = {name: getattr(config, name) for name in names}
    return OnnxConfig(**{**values, **others})


@dataclass(frozen=True, kw_only=True)
class OnnxCommand(OnnxConfig, SourceOptions):
    """``vtk export onnx``: the source and the options."""
