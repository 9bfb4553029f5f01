"""Options that several commands share: type, help, group and bounds of each.

A config gives the default: ``seed: Seed = 0``.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from vtk.options import Config, Option

MOST_SEED = 2**32 - 1
"""Largest seed of NumPy's generators."""
MOST_SIDE = 1 << 14
"""Pixels of a side; building a model for more takes hours."""
MOST_THREADS = max(64, 4 * (os.cpu_count() or 1))
"""Upper bound: thousands of threads would crash the OpenMP runtime."""

# ---- what to open
SourceName = Annotated[
    str, Option("task pack, run folder, merged .safetensors or timm model name", "source", often=True)
]
NamedSource = Annotated[
    str, Option("task pack, run folder, merged .safetensors or exported file", "source", often=True)
]  # fmt: skip
"""A source with class names, which a timm model name lacks."""
Base = Annotated[Path | None, Option("base weights of the pack, if not found automatically", "source")]
Pretrained = Annotated[
    bool, Option("timm name: pretrained weights from the hub", "source", often=True, off="timm name: random weights")
]
NumClasses = Annotated[
    int | None, Option("timm name: number of classes (default: the pretrained weights')", "source", least=1)
]
Trust = Annotated[
    bool,
    Option("also run machine code (.pt2, TensorRT engine) found in a folder, not only a file named here", "source"),
]
ImgSize = Annotated[
    int | tuple[int, int] | None,
    Option(
        "timm name: image size, one side or height and width", "source", often=True, least=1,
        most=MOST_SIDE,
    ),
]  # fmt: skip

# ---- where and how a command runs
Device = Annotated[
    str,
    Option(
        "auto, cpu, cuda or cuda:N", "running", often=True, convert=str,
        pattern=r"auto|cpu|cuda(:\d+)?", allowed="auto, cpu, cuda or cuda:N",
    ),
]  # fmt: skip
Threads = Annotated[int | None, Option("CPU threads (default: torch's choice)", "running", least=1, most=MOST_THREADS)]
Cpus = Annotated[
    str | None,
    Option(
        "CPU cores to run on, such as 0-3 or 0,2; one thread on each without --threads (default: all)", "running",
        pattern=r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", allowed="cores such as 0-3 or 0,2",
    ),
]  # fmt: skip
Workers = Annotated[
    int | None,
    Option("processes that decode images (default: one per CPU core, at most 8)", "running", least=0, most=1024),
]
Seed = Annotated[int, Option("random seed", "running", often=True, least=0, most=MOST_SEED)]
EvalBatch = Annotated[int, Option("images per forward pass", "running", least=1)]

# ---- what a command writes
Out = Annotated[Path, Option("folder to write", "output", often=True)]
MaybeOut = Annotated[Path | None, Option("folder to write (default: nothing is written)", "output", often=True)]
OutFile = Annotated[Path, Option("file to write", "output", often=True)]
Overwrite = Annotated[bool, Option("overwrite existing output", "output", often=True)]

# ---- images
Split = Annotated[
    Literal["val", "train", "all"] | None,
    Option(
        "part of the images to use; by default int8 and fp8 calibrate on train and are judged on val",
        "data",
        often=True,
    ),
]
"""None is the default of commands that both calibrate and judge; elsewhere it is ``val``."""
Folder = Annotated[Path, Option("train/ and val/, class folders, or a table of labels", "data", often=True)]
MaybeFolder = Annotated[
    Path | None,
    Option("train/ and val/, class folders, or a table of labels", "data", often=True),
]
ValSplit = Annotated[
    float, Option("fraction of the images to hold out, if the folder has no val/", "data", above=0, below=1)
]

TrainShare = Annotated[
    float, Option("fraction of the training images to use, stratified by class", "data", above=0, most=1)
]

# ---- exports and their verification
VerifyData = Annotated[
    Path | None,
    Option("image or folder to verify with (default: random images); for the run's folder, its held-out part",
           "verification", often=True),
]  # fmt: skip
VerifyDataOf = Annotated[
    tuple[str, ...],
    Option(
        "images to verify with, for all sources or one option per source (default: random images)", "verification",
        often=True, flag="data", metavar="[NAME=]FOLDER",
    ),
]  # fmt: skip
JudgeImages = Annotated[
    int,
    Option("number of images of --data on which fp16, bf16, fp8 and int8 files are judged", "verification", least=1),
]
Unverified = Annotated[
    bool, Option("keep a file that cannot be verified on this machine; marked as unverified", "verification")
]
ProfileSizes = Annotated[
    tuple[int, ...],
    Option(
        "benchmark the file at these batch sizes, such as 1,8,32; writes latency.json", "verification",
        often=True, least=1, unique=True,
    ),
]  # fmt: skip
Opset = Annotated[int, Option("ONNX opset", "format", least=18, most=22)]
StaticBatch = Annotated[int | None, Option("fixed batch size (default: dynamic)", "format", often=True, least=1)]
Fuse = Annotated[
    bool | None,
    Option("fold norms and scales, merge parallel branches (default: where faster)", "format", often=True),
]
Dtype = Annotated[
    Literal["fp32", "fp16", "bf16"],
    Option("precision of weights, arithmetic, inputs and outputs; norms and softmax stay fp32", "format", often=True),
]
GraphDtype = Annotated[
    Literal["fp32", "fp16", "bf16", "fp8"],
    Option(
        "precision of weights and arithmetic; norms and softmax stay fp32; fp8 is calibrated on --data",
        "format", often=True,
    ),
]  # fmt: skip
KeepIoTypes = Annotated[bool, Option("keep inputs and outputs in fp32 with any --dtype", "format")]
Int8 = Annotated[
    Literal["dynamic", "static"] | None,
    Option("int8: dynamic, for CPUs, one image per call; static, calibrated on --data", "format", often=True),
]
CalibrationImages = Annotated[
    int, Option("number of images of --data to calibrate on (--int8 static, --dtype fp8)", "format", least=1)
]
MaxDrop = Annotated[
    float | None,
    Option("--int8 static: keep products in float until int8 changes the class of at most POINTS % of images", "format",
           metavar="POINTS", above=0, below=100),
]  # fmt: skip
Softmax = Annotated[bool, Option("output `probabilities` (calibrated by the card) instead of `logits`", "format")]
AutoThreshold = Annotated[
    Literal["auto"] | None,
    Option('auto: "unknown" where the score is below one chosen for --risk', "output", often=True),
]
Risk = Annotated[
    float | None,
    Option("--threshold auto: largest share of errors among the answers given (default: 0.02)", "output", often=True,
           above=0, below=1),
]  # fmt: skip

# ---- running, judging and measuring a model
RunBackend = Annotated[
    str | None,
    Option(
        "eager, compile, fused, ort-cpu, ort-cuda, openvino (default: eager; ort-cpu for .onnx)", "running",
        nonempty=True,
    ),
]  # fmt: skip
RunPrecision = Annotated[
    Literal["fp32", "bf16", "fp16", "fp8"] | None,
    Option("precision (default: the training run's); fp8 is calibrated and judged on --data", "running"),
]
Fp8Images = Annotated[
    Path | None,
    Option("--precision fp8, --on cpu: folder; its training images calibrate, its held-out images judge", "data"),
]
RunDevice = Annotated[
    str | None,
    Option(
        "auto, cpu, cuda or cuda:N (default: the training run's)", "running", often=True, convert=str,
        pattern=r"auto|cpu|cuda(:\d+)?", allowed="auto, cpu, cuda or cuda:N",
    ),
]  # fmt: skip
RunBatch = Annotated[int | None, Option("images per forward pass (default: the training run's)", "running", least=1)]
Reference = Annotated[
    str | None,
    Option("pack, checkpoint or model to compare the outputs with", "verification", often=True, nonempty=True),
]
BudgetMs = Annotated[
    float | None,
    Option("latency budget in ms: find the highest throughput (images/s) within it", "measure", often=True, above=0),
]
Stability = Annotated[
    float, Option("stable when the last three medians agree within this percentage", "measure", above=0)
]


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Config):
    """The source of commands that run a model."""

    GROUP: ClassVar[str] = "source"

    source: SourceName
    base: Base = None
    pretrained: Pretrained = True
    num_classes: NumClasses = None
    img_size: ImgSize = None
    trust: Trust = False

    def opening(self) -> dict[str, Any]:
        """Return the arguments of `vtk.open_source` besides the source."""
        names = ("base", "pretrained", "num_classes", "img_size", "trust")
        return {name: getattr(self, name) for name in names} | {"seed": getattr(self, "seed", 0)}
