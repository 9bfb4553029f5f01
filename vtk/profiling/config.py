"""Options of ``vtk profile``."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vtk.errors import UsageError
from vtk.evaluation.config import check_threads


@dataclass(frozen=True)
class ProfileConfig:
    """What to measure, on what, and where the report goes.

    Raises:
        UsageError: a value is out of range, named twice or contradicts another.
    """

    source: str = field(metadata={"help": "a task pack, a merged checkpoint, an .onnx file or a timm model name"})
    batch_sizes: tuple[int, ...] = field(
        default=(1, 2, 4, 8, 16, 32), metadata={"help": "images per call; measured in ascending order"}
    )
    backends: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "eager, compile, fused, fused+graph, ort-cpu, ort-cuda. By default eager, compile, fused, ort-cpu, "
            "on CUDA all but ort-cpu; one of those that is absent is a row, one named here and absent is exit 5"
        },
    )
    device: str = field(default="auto", metadata={"help": "auto (CUDA if there is one), cpu, cuda or cuda:N"})
    precision: Literal["fp32", "bf16", "fp16"] = field(default="fp32", metadata={"help": "of weights and inputs"})
    threads: int | None = field(
        default=None, metadata={"help": "CPU threads of every back-end; by default as many as torch takes"}
    )
    duration: float = field(
        default=10.0, metadata={"help": "seconds per batch size; it ends earlier at 1,000 runs, never before 10 runs"}
    )
    budget_ms: float | None = field(
        default=None, metadata={"help": "latency budget: says which batch size meets it with the most images/s"}
    )
    img_size: int | tuple[int, int] | None = field(
        default=None, metadata={"help": "of a timm model: N, or height and width; packs and .onnx know theirs"}
    )
    pretrained: bool = field(
        default=True, metadata={"help": "of a timm model: weights of the hub; random ones are enough to time it"}
    )
    num_classes: int | None = field(default=None, metadata={"help": "of a timm model whose weights have no classifier"})
    base: Path | None = field(default=None, metadata={"help": "base weights of a pack, where they are not found alone"})
    seed: int = field(default=0, metadata={"help": "of the random images and of random weights"})
    out: Path | None = field(
        default=None, metadata={"help": "folder for report.html, latency.png, profile.json, profile.csv"}
    )
    overwrite: bool = field(default=False, metadata={"help": "write into --out although it is not empty"})

    def __post_init__(self) -> None:
        if not str(self.source).strip():
            raise UsageError("`source` is empty; give a task pack, a checkpoint, an .onnx file or a timm model name")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise UsageError(f"`--batch-sizes` {_show(self.batch_sizes)}: give whole numbers from 1 on, such as 1,8")
        for flag, values in (("--batch-sizes", self.batch_sizes), ("--backends", self.backends)):
            if len(set(values)) < len(values):
                raise UsageError(f"`{flag}` {_show(values)} names one of them twice; name each once")
        if self.num_classes is not None and self.num_classes < 1:
            raise UsageError(f"`--num-classes` {self.num_classes}: give a whole number of at least 1")
        check_threads(self.threads)
        if not (math.isfinite(self.duration) and self.duration > 0):
            raise UsageError(f"`--duration` {self.duration}: give seconds above 0")
        if self.budget_ms is not None and not (math.isfinite(self.budget_ms) and self.budget_ms > 0):
            raise UsageError(f"`--budget-ms` {self.budget_ms}: give milliseconds above 0")
        kind, _, index = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (":" in self.device and (kind != "cuda" or not index.isdigit())):
            raise UsageError(f"`--device` {self.device}: choose auto, cpu, cuda or cuda:N")


def _show(values: tuple[object, ...]) -> str:
    return ",".join(map(str, values)) or "(nothing)"
