"""Options of ``vtk export openvino``; free of torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from vtk.errors import UsageError
from vtk.options import Option
from vtk.options.shared import (
    AutoThreshold,
    CalibrationImages,
    JudgeImages,
    MaxDrop,
    Out,
    Overwrite,
    ProfileSizes,
    Risk,
    Softmax,
    SourceOptions,
    StaticBatch,
    VerifyData,
)
from vtk_export.onnx.config import OnnxConfig, derive
from vtk_export.options import ExportConfig
from vtk_export.tensor_names import InputName, OutputName


@dataclass(frozen=True, kw_only=True)
class OpenvinoConfig(ExportConfig):
    """Options of the OpenVINO export of one model.

    Raises:
        UsageError: a value is out of range, or two values contradict each other.
    """

    out: Out
    dtype: Annotated[
        Literal["fp32", "fp16"], Option("type of the stored weights; fp16 halves the file", "format", often=True)
    ] = "fp32"
    precision: Annotated[
        Literal["fp32", "bf16"] | None,
        Option("precision of the products, verified and written into README.md (default: bf16 where the processor has "
               "it, else fp32)", "format", often=True),
    ] = None  # fmt: skip
    int8: Annotated[
        Literal["static"] | None, Option("int8 weights and products, calibrated on --data", "format", often=True)
    ] = None
    max_drop: MaxDrop = None
    static_batch: StaticBatch = None
    dynamic_size: Annotated[bool, Option("dynamic height and width, for models that accept several sizes")] = False
    with_preproc: Annotated[
        bool, Option("preprocessing in the model; the input is uint8 RGB of any size", often=True)
    ] = False
    softmax: Softmax = False
    threshold: AutoThreshold = None
    risk: Risk = None
    output: Annotated[
        Literal["logits", "features", "both"], Option("features: the classifier's input, (batch, channels)")
    ] = "logits"
    input_name: InputName = ()
    output_name: OutputName = ()
    calibration_images: CalibrationImages = 128
    data: VerifyData = None
    images: JudgeImages = 256
    profile: ProfileSizes = ()
    overwrite: Overwrite = False

    def check(self) -> None:
        """Refuse options that contradict each other: those of the ONNX graph that the model is made of."""
        if self.int8 and self.dtype != "fp32":
            raise UsageError("`--int8` stores the weights of products in int8 and the rest in fp32, which --dtype "
                             f"{self.dtype} contradicts; leave one out")  # fmt: skip
        self.onnx()

    def onnx(self) -> OnnxConfig:
        """Return the options of the ONNX graph that the model is converted from."""
        return derive(self, dtype="fp32")


@dataclass(frozen=True, kw_only=True)
class OpenvinoCommand(OpenvinoConfig, SourceOptions):
    """``vtk export openvino``: the source and the options."""
