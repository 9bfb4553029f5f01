"""Options that several commands have: each one's type, help, group and bounds, once.

A config gives the default: ``seed: Seed = 0``.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from vtk.options import Config, Option

MOST_SEED = 2**32 - 1
"""What NumPy's generators take."""
MOST_SIDE = 1 << 14
"""Pixels of a side; a model for more takes hours to build."""
MOST_THREADS = max(64, 4 * (os.cpu_count() or 1))
"""Thousands of threads would end the process inside the OpenMP run time."""

# ---- what to open
SourceName = Annotated[
    str, Option("task pack, run folder, merged .safetensors or timm model name", "source", often=True)
]
NamedSource = Annotated[
    str, Option("task pack, run folder, merged .safetensors or exported file", "source", often=True)
]  # fmt: skip
"""What knows the names of its classes, as a timm model name does not."""
Base = Annotated[Path | None, Option("base weights of the pack, if they moved (default: looked up)", "source")]
Pretrained = Annotated[
    bool, Option("timm name: the hub's weights", "source", often=True, off="timm name: random weights, not the hub's")
]
NumClasses = Annotated[int | None, Option("timm name: another number of classes", "source", least=1)]
Trust = Annotated[
    bool, Option("run machine code (.pt2, TensorRT engine) of a folder, too, not only of a file named here", "source")
]
ImgSize = Annotated[
    int | tuple[int, int] | None,
    Option(
        "timm name: image size, one side or height and width; others know theirs", "source", often=True, least=1,
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
Threads = Annotated[
    int | None, Option("CPU threads (default: torch's own number)", "running", least=1, most=MOST_THREADS)
]
Workers = Annotated[
    int | None,
    Option("processes that decode images (default: one per CPU core, at most 8)", "running", least=0, most=1024),
]
Seed = Annotated[
    int, Option("random seed of everything drawn at random", "running", often=True, least=0, most=MOST_SEED)
]
EvalBatch = Annotated[int, Option("images per forward pass", "running", least=1)]

# ---- what a command writes
Out = Annotated[Path, Option("folder to write", "output", often=True)]
MaybeOut = Annotated[Path | None, Option("folder to write (default: nothing is written)", "output", often=True)]
OutFile = Annotated[Path, Option("file to write", "output", often=True)]
Overwrite = Annotated[bool, Option("replace what is there", "output", often=True)]

# ---- images
Split = Annotated[
    Literal["val", "train", "all"] | None,
    Option("part of the images: val, held out, judges; train calibrates int8 and fp8", "data", often=True),
]
"""None is the default of what both judges and calibrates; elsewhere it is ``val``."""
Folder = Annotated[Path, Option("train/ and val/, class folders, or a table of labels", "data", often=True)]
MaybeFolder = Annotated[
    Path | None,
    Option("train/ and val/, class folders, or a table of labels", "data", often=True),
]
ValSplit = Annotated[
    float, Option("fraction of the images held out, where the folder has no val/", "data", above=0, below=1)
]

# ---- exports and what judges them
VerifyData = Annotated[
    Path | None,
    Option("image or folder to verify with (default: random images); of the run's folder its held-out part",
           "verification", often=True),
]  # fmt: skip
VerifyDataOf = Annotated[
    tuple[str, ...],
    Option(
        "images to verify with, for all sources or once for each (default: random images)", "verification",
        often=True, flag="data", metavar="[NAME=]FOLDER",
    ),
]  # fmt: skip
JudgeImages = Annotated[
    int, Option("images of --data on which fp16, bf16, fp8 and int8 files are judged", "verification", least=1)
]
Unverified = Annotated[
    bool, Option("keep a file that cannot be verified on this machine; marked as unverified", "verification")
]
ProfileSizes = Annotated[
    tuple[int, ...],
    Option(
        "measure the file at these batch sizes, such as 1,8,32; writes latency.json", "verification",
        often=True, least=1, unique=True,
    ),
]  # fmt: skip
Opset = Annotated[int, Option("opset of the ONNX file", "format", least=18, most=22)]
StaticBatch = Annotated[int | None, Option("fixed batch size (default: any batch size)", "format", often=True, least=1)]
Fuse = Annotated[
    bool | None,
    Option("fold norms and scales, merge parallel branches (default: wherever that is quicker)", "format", often=True),
]
Dtype = Annotated[
    Literal["fp32", "fp16", "bf16"],
    Option("weights and arithmetic, inputs and outputs; norms and softmax stay fp32", "format", often=True),
]
GraphDtype = Annotated[
    Literal["fp32", "fp16", "bf16", "fp8"],
    Option(
        "of weights and arithmetic; norms and softmax stay fp32; fp8: calibrated on --data, the rest is fp16",
        "format", often=True,
    ),
]  # fmt: skip
KeepIoTypes = Annotated[bool, Option("inputs and outputs stay fp32 whatever the --dtype", "format")]
Int8 = Annotated[
    Literal["dynamic", "static"] | None,
    Option("int8: dynamic, for CPUs, one image a call; static, calibrated on --data", "format", often=True),
]
CalibrationImages = Annotated[
    int, Option("--int8 static, --dtype fp8: images of --data to calibrate on", "format", least=1)
]
Softmax = Annotated[bool, Option("the output is `probabilities` instead of `logits`", "format")]

# ---- how a model is run, judged and measured
RunBackend = Annotated[
    str | None,
    Option(
        "eager, compile, fused, fused+nograph, ort-cpu, ort-cuda (default: eager; ort-cpu for .onnx)", "running",
        nonempty=True,
    ),
]  # fmt: skip
RunPrecision = Annotated[
    Literal["fp32", "bf16", "fp16", "fp8"] | None,
    Option("number format (default: the training run's); fp8 is calibrated and judged on --data", "running"),
]
Fp8Images = Annotated[
    Path | None, Option("--precision fp8: folder whose training images calibrate and held-out ones judge it", "data")
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
    Option("pack, checkpoint or model whose answers are compared with", "verification", often=True, nonempty=True),
]
BudgetMs = Annotated[
    float | None,
    Option("latency budget: find what meets it with most images/s", "measure", often=True, above=0),
]
Stability = Annotated[
    float, Option("stable when the last three medians agree within this percentage", "measure", above=0)
]


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Config):
    """What to open, of commands that run a model: apart from what is done with it."""

    GROUP: ClassVar[str] = "source"

    source: SourceName
    base: Base = None
    pretrained: Pretrained = True
    num_classes: NumClasses = None
    img_size: ImgSize = None
    trust: Trust = False

    def opening(self) -> dict[str, Any]:
        """Return what `vtk.open_source` is told beside the source."""
        names = ("base", "pretrained", "num_classes", "img_size", "trust")
        return {name: getattr(self, name) for name in names} | {"seed": getattr(self, "seed", 0)}
