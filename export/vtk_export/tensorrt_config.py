"""Options of ``vtk export tensorrt``; free of torch and onnx."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vtk.errors import UsageError
from vtk_export.config import OPSETS, OnnxConfig
from vtk_export.targets import Target, parse_target

OLD = Target("trt", "8.6", 17, 8)
"""TensorRT 8.6: opset 17 and ONNX 1.13.1, by docs/operators.md and docs/Changelog.md of onnx/onnx-tensorrt."""


def parse_version(text: str) -> Target:
    """Read ``10.3``, ``10.x`` or ``10`` (whatever every 10 takes), the same with 11, and ``8.6``.

    Raises:
        UsageError: another version, or one whose needs are not known.
    """
    match = re.fullmatch(r"(8|10|11)(?:\.(x|\d+)(?:\.\d+)*)?", text)
    if match is None:
        raise UsageError(f"`--trt` {text!r} is no TensorRT that this knows; give 10.x, 11.x, a version such as "
                         "10.3, or 8.6")  # fmt: skip
    major, minor = match[1], match[2] or "x"
    if major == "8":
        if minor != "6":
            raise UsageError(f"`--trt` {text}: of TensorRT 8 only 8.6 has LayerNormalization; give 8.6, 10.x or 11.x")
        return OLD
    return parse_target(f"trt:{major}.{'0' if minor == 'x' else minor}")


@dataclass(frozen=True)
class TensorrtConfig:
    """Options of ``vtk export tensorrt``."""

    source: str = field(
        metadata={"help": "task pack, run folder, merged .safetensors, or timm model name; of --lint an .onnx"}
    )
    out: Path | None = field(default=None, metadata={"help": "folder for model.onnx and what builds an engine of it"})
    trt: str = field(
        default="10.x",
        metadata={"help": "version the engine is built with: 10.x, 11.x, one of them such as 10.3, or 8.6 (fp32 only)"},
    )
    dtype: Literal["fp32", "fp16", "bf16"] = field(
        default="fp32",
        metadata={"help": "of weights, arithmetic, inputs and outputs; norms and softmax stay fp32. TensorRT has fused "
                          "attention for fp16 and bf16 alone"},
    )  # fmt: skip
    keep_io_types: bool = field(default=False, metadata={"help": "inputs and outputs stay fp32 whatever the --dtype"})
    min: int = field(default=1, metadata={"help": "fewest images of one call"})
    opt: int = field(default=8, metadata={"help": "images of one call that the engine is tuned for"})
    max: int = field(default=32, metadata={"help": "most images of one call"})
    static_batch: int | None = field(
        default=None, metadata={"help": "a graph of this batch size only, in place of --min, --opt and --max"}
    )
    tf32: bool = field(default=True, metadata={"help": "fp32 products may be rounded to TF32, as TensorRT does itself"})
    workspace: int = field(default=4096, metadata={"help": "MiB of GPU memory that building and running may use"})
    opset: int = field(default=18, metadata={"help": "ONNX opset, 18 to 22; for 8.6 the file is lowered to 17"})
    build: bool = field(
        default=False, metadata={"help": "also build the engine, where TensorRT is installed (exit code 5 elsewhere)"}
    )
    lint: bool = field(
        default=False, metadata={"help": "only say what TensorRT would refuse or run slowly in an .onnx of any program"}
    )
    fuse: bool | None = field(
        default=None,
        metadata={"help": "fold norms and scales, merge branches, split q, k, v; default: wherever that can be"},
    )
    data: Path | None = field(
        default=None, metadata={"help": "image or folder of images to verify with; default: smoothed random images"}
    )
    base: Path | None = field(default=None, metadata={"help": "base weights of the pack, if they moved"})
    pretrained: bool = field(default=True, metadata={"help": "timm name: take the hub's weights, else random ones"})
    num_classes: int | None = field(default=None, metadata={"help": "timm name: another number of classes"})
    img_size: int | tuple[int, int] | None = field(
        default=None, metadata={"help": "timm name: pixels, one number or height and width"}
    )
    unverified: bool = field(
        default=False, metadata={"help": "keep a file that nothing here can run (bf16 without a GPU); it says so"}
    )
    images: int = field(default=256, metadata={"help": "images of --data that fp16 and bf16 files are judged on"})
    seed: int = field(default=0, metadata={"help": "of random images, and of random weights of a timm name"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads of the verification"})
    profile: tuple[int, ...] = field(
        default=(),
        metadata={"help": "batch sizes such as 1,8,32: measure model.onnx in ONNX Runtime, with --build the engine "
                          "too, and leave latency.json beside them"},
    )  # fmt: skip
    overwrite: bool = field(default=False, metadata={"help": "write into a folder that holds other files too"})

    def __post_init__(self) -> None:
        target = self.target
        if self.lint:
            if self.out is not None or self.build or self.profile:
                raise UsageError("`--lint` writes, builds and measures nothing; leave out --out, --build and --profile")
            return
        if self.out is None:
            raise UsageError("`--out` is missing; give a folder, or --lint to look at an .onnx only")
        if self.static_batch is None:
            if not 1 <= self.min <= self.opt <= self.max:
                raise UsageError(f"`--min` {self.min}, `--opt` {self.opt}, `--max` {self.max}: give numbers from 1 on "
                                 "that do not fall")  # fmt: skip
        elif (self.min, self.opt, self.max) != (1, 8, 32):
            raise UsageError("`--static-batch` is the one batch size; leave out --min, --opt and --max")
        if self.workspace < 1:
            raise UsageError(f"`--workspace` is {self.workspace} MiB; give at least 1")
        if target is OLD and self.dtype != "fp32":
            raise UsageError(f"`--trt 8.6` lowers what --dtype {self.dtype} keeps in fp32, its networks not being "
                             "strongly typed; give --dtype fp32, or --trt 10.x")  # fmt: skip
        if target is OLD and self.opset != OPSETS.start:
            raise UsageError(f"`--opset` {self.opset} cannot be lowered to the 17 of TensorRT 8.6; leave it out")
        self.onnx_config(Path())  # has its own checks

    @property
    def target(self) -> Target:
        """The version of TensorRT and what it takes."""
        return parse_version(self.trt)

    @property
    def shapes(self) -> tuple[int, int, int]:
        """Fewest, usual and most images of one call."""
        return (self.min, self.opt, self.max) if self.static_batch is None else (self.static_batch,) * 3

    def onnx_config(self, out: Path, **more: Any) -> OnnxConfig:
        """Return the options of the ONNX file; ``more`` replaces some."""
        options: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("source", "dtype", "keep_io_types", "static_batch", "opset", "fuse", "data", "base",
                         "pretrained", "num_classes", "img_size", "unverified", "images", "seed", "threads", "profile")
        }  # fmt: skip
        old = self.target is OLD
        target = {"ir_version": OLD.ir_version} if old else {"target": self.target.text}
        return OnnxConfig(**{**options, **target, "out": out, **more})
