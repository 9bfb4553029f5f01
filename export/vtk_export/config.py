"""Options of the exporters; free of torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vtk.errors import UsageError
from vtk_export.targets import IR_VERSIONS, parse_target

OPSETS = range(18, 23)
"""Opsets of the standard ONNX domain that torch's exporter writes and that are tested here."""


def check_profile(sizes: tuple[int, ...], static_batch: int | None) -> None:
    """Refuse batch sizes of ``--profile`` that cannot be measured.

    Raises:
        UsageError: below 1, twice the same, or none that a file of one batch size takes.
    """
    told = ",".join(map(str, sizes))
    if min(sizes, default=1) < 1 or len(set(sizes)) < len(sizes):
        raise UsageError(f"`--profile` {told}: give different batch sizes from 1 on")
    if sizes and static_batch is not None and static_batch not in sizes:
        raise UsageError(f"`--profile` {told}: the file takes batches of {static_batch} only; give --profile "
                         f"{static_batch}")  # fmt: skip


@dataclass(frozen=True)
class OnnxConfig:
    """Options of ``vtk export onnx``."""

    source: str = field(metadata={"help": "task pack, run folder, merged .safetensors, or timm model name"})
    out: Path = field(metadata={"help": "folder for model.onnx and model.json"})
    opset: int = field(default=18, metadata={"help": "ONNX opset, 18 to 22"})
    static_batch: int | None = field(default=None, metadata={"help": "fixed batch size; default: any batch size"})
    data: Path | None = field(
        default=None, metadata={"help": "image or folder of images to verify with; default: smoothed random images"}
    )
    base: Path | None = field(default=None, metadata={"help": "base weights of the pack, if they moved"})
    pretrained: bool = field(default=True, metadata={"help": "timm name: take the hub's weights, else random ones"})
    num_classes: int | None = field(default=None, metadata={"help": "timm name: another number of classes"})
    img_size: int | tuple[int, int] | None = field(
        default=None, metadata={"help": "timm name: pixels, one number or height and width"}
    )
    fuse: bool | None = field(
        default=None,
        metadata={
            "help": "fold norms and scales, merge parallel branches; default: wherever the model can be, but not for "
            "--int8 static, which ONNX Runtime runs faster as it is"
        },
    )
    dtype: Literal["fp32", "fp16", "bf16"] = field(
        default="fp32",
        metadata={"help": "of weights, arithmetic, inputs and outputs; norms, softmax and reductions stay fp32"},
    )
    keep_io_types: bool = field(default=False, metadata={"help": "inputs and outputs stay fp32 whatever the --dtype"})
    int8: Literal["dynamic", "static"] | None = field(
        default=None,
        metadata={
            "help": "dynamic: int8 weights, ranges measured at every run, for CPU servers; static: QDQ nodes, ranges "
            "calibrated on --data, for TensorRT and GPUs"
        },
    )
    calibration_images: int = field(default=128, metadata={"help": "--int8 static: images of --data to calibrate on"})
    dynamic_size: bool = field(
        default=False, metadata={"help": "height and width stay open, for models that take several sizes"}
    )
    with_preproc: bool = field(
        default=False, metadata={"help": "resize, crop and normalise in the graph: it takes `images`, uint8 (batch, "
                                         "height, width, 3), RGB, of any size"}
    )  # fmt: skip
    target: str | None = field(
        default=None,
        metadata={"help": "tritonserver:YY.MM, trt:X.Y or ort:X.Y; opset and IR version are kept to what it takes"},
    )
    ir_version: int | None = field(
        default=None, metadata={"help": "ONNX IR version, 8 to 10; default: 10, or what the --target takes"}
    )
    softmax: bool = field(default=False, metadata={"help": "the file gives `probabilities` instead of `logits`"})
    output: Literal["logits", "features", "both"] = field(
        default="logits", metadata={"help": "features are what the classifier reads, (batch, channels)"}
    )
    unverified: bool = field(
        default=False, metadata={"help": "keep a file that nothing here can run (bf16 without a GPU); it says so"}
    )
    images: int = field(default=256, metadata={"help": "images of --data that fp16, bf16 and int8 files are judged on"})
    seed: int = field(default=0, metadata={"help": "of random images, and of random weights of a timm name"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads of the verification"})
    profile: tuple[int, ...] = field(
        default=(), metadata={"help": "batch sizes such as 1,8,32: measure the file and leave latency.json beside it"}
    )
    overwrite: bool = field(default=False, metadata={"help": "write into a folder that holds other files too"})

    def __post_init__(self) -> None:
        if self.opset not in OPSETS:
            raise UsageError(f"`--opset` {self.opset} is not supported; give {OPSETS.start} to {OPSETS.stop - 1}")
        if self.static_batch is not None and self.static_batch < 1:
            raise UsageError(f"`--static-batch` is {self.static_batch}; give at least 1, or leave it out for any batch")
        check_profile(self.profile, self.static_batch)
        if self.profile and self.output == "features":
            raise UsageError("`--profile` compares logits, and this file gives no logits; leave it out, or give "
                             "--output both")  # fmt: skip
        if self.num_classes is not None and self.num_classes < 1:
            raise UsageError(f"`--num-classes` is {self.num_classes}; give at least 1")
        if self.keep_io_types and self.dtype == "fp32":
            raise UsageError("`--keep-io-types` is for --dtype fp16 or bf16; an fp32 file has fp32 inputs and outputs")
        if self.int8 and self.dtype != "fp32":
            raise UsageError(f"`--int8` leaves the rest in fp32, so --dtype {self.dtype} contradicts it; leave out one")
        if self.int8 == "static" and self.data is None:
            raise UsageError("`--int8 static` measures the activations' ranges on images; give --data FOLDER")
        if self.calibration_images < 1:
            raise UsageError(f"`--calibration-images` is {self.calibration_images}; give at least 1")
        if self.dynamic_size and self.with_preproc:
            raise UsageError(
                "`--with-preproc` brings images to the model's own size, --dynamic-size opens it; leave one out"
            )
        self._check_target()
        if self.softmax and self.output == "features":
            raise UsageError("`--softmax` is of logits, `--output features` has none; give --output both or logits")
        if self.images < 1:
            raise UsageError(f"`--images` is {self.images}; give at least 1")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"`--threads` is {self.threads}; give at least 1")

    def _check_target(self) -> None:
        if self.ir_version is not None and self.ir_version not in IR_VERSIONS:
            raise UsageError(f"`--ir-version` {self.ir_version} is not supported; give {IR_VERSIONS.start} to "
                             f"{IR_VERSIONS.stop - 1}")  # fmt: skip
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


@dataclass(frozen=True)
class TasksConfig:
    """Options of ``vtk export tasks``."""

    out: Path = field(metadata={"help": "folder for the .onnx files, their data and tasks.json"})
    packs: tuple[Path, ...] = field(
        default=(), metadata={"help": "task packs or run folders, at least two, each as PACK or NAME=PACK"}
    )
    form: Literal["files", "gathered", "both"] = field(
        default="files",
        metadata={"help": "files: one .onnx per task, on one file of shared weights; gathered: one .onnx with an input "
                          "`task`, for mixed batches; or both"},
    )  # fmt: skip
    opset: int = field(default=18, metadata={"help": "ONNX opset, 18 to 22"})
    static_batch: int | None = field(default=None, metadata={"help": "fixed batch size; default: any batch size"})
    data: Path | None = field(
        default=None, metadata={"help": "image or folder of images to verify with; default: smoothed random images"}
    )
    base: Path | None = field(default=None, metadata={"help": "base weights of the packs, if they moved"})
    fuse: bool | None = field(
        default=None,
        metadata={"help": "files: fold norms and scales, merge branches; default: for models with parallel branches"},
    )
    seed: int = field(default=0, metadata={"help": "of random images"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads of the verification"})
    profile: tuple[int, ...] = field(
        default=(), metadata={"help": "batch sizes such as 1,8,32: measure each file and leave its latency beside it"}
    )
    overwrite: bool = field(default=False, metadata={"help": "write into a folder that holds other files too"})

    def __post_init__(self) -> None:
        if self.opset not in OPSETS:
            raise UsageError(f"`--opset` {self.opset} is not supported; give {OPSETS.start} to {OPSETS.stop - 1}")
        for flag, value in (("--static-batch", self.static_batch), ("--threads", self.threads)):
            if value is not None and value < 1:
                raise UsageError(f"`{flag}` is {value}; give at least 1")
        check_profile(self.profile, self.static_batch)
        if self.fuse and self.form != "files":
            raise UsageError(f"`--fuse` is for --form files, `--form` is {self.form}: weights that each image gathers "
                             "cannot be folded; leave it out")  # fmt: skip
