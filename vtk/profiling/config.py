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

    source: str = field(
        default="",
        metadata={"help": "a task pack, a merged checkpoint, an .onnx, .pt2 or TensorRT file, or a timm model name"},
    )
    batch_sizes: tuple[int, ...] = field(
        default=(1, 2, 4, 8, 16, 32), metadata={"help": "images per call; measured in ascending order"}
    )
    backends: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "eager, compile, fused, fused+graph, aoti, bank, bank+graph, ort-cpu, ort-cuda, ort-trt, tensorrt "
            "(an engine, or the one built beside an .onnx). By default eager, "
            "compile, fused, ort-cpu, on CUDA also fused+graph and ort-cuda for ort-cpu; one of those that is absent "
            "is a row, one named here and absent is exit 5"
        },
    )
    device: str = field(default="auto", metadata={"help": "auto (CUDA if there is one), cpu, cuda or cuda:N"})
    precision: Literal["fp32", "bf16", "fp16"] = field(default="fp32", metadata={"help": "of weights and inputs"})
    threads: int | None = field(
        default=None, metadata={"help": "CPU threads of every back-end; by default as many as torch takes"}
    )
    duration: float = field(
        default=10.0,
        metadata={
            "help": "most timed seconds per cell; a stable one ends earlier, with the runs for the highest percentile "
            "(p50 20, p90 100, p99 1,000) that fits into them"
        },
    )
    stability: float = field(
        default=3.0, metadata={"help": "percent within which the last three windows' medians agree in a stable cell"}
    )
    order: Literal["interleaved", "sequential"] = field(
        default="interleaved",
        metadata={"help": "back-ends take turns at each batch size, or one is measured whole before the next"},
    )
    h2d: Literal["in", "out"] = field(
        default="out", metadata={"help": "copies from and to the host are in the times of all back-ends, or of none"}
    )
    budget_ms: float | None = field(
        default=None, metadata={"help": "latency budget: says which back-end and batch size meet it with most images/s"}
    )
    ceilings: bool = field(
        default=False,
        metadata={"help": "measure the device's copy bandwidth and product rate first and keep them, for the roofline"},
    )
    tasks: tuple[str, ...] = field(
        default=(), metadata={"help": "of bank and bank+graph: more packs that they hold beside the source"}
    )
    img_size: int | tuple[int, int] | None = field(
        default=None, metadata={"help": "of a timm model: N, or height and width; packs and .onnx know theirs"}
    )
    img_sizes: tuple[int, ...] = field(
        default=(), metadata={"help": "of a timm model: measure it at each of these sizes, one report for each"}
    )
    pretrained: bool = field(
        default=True, metadata={"help": "of a timm model: weights of the hub; random ones are enough to time it"}
    )
    num_classes: int | None = field(default=None, metadata={"help": "of a timm model whose weights have no classifier"})
    base: Path | None = field(default=None, metadata={"help": "base weights of a pack, where they are not found alone"})
    reference: str | None = field(
        default=None, metadata={"help": "a pack, checkpoint or model to compare outputs with, in place of the source"}
    )
    seed: int = field(default=0, metadata={"help": "of the random images and of random weights"})
    compare: tuple[str, ...] = field(
        default=(), metadata={"help": "two profile.json, old and new: show what changed and measure nothing"}
    )
    fail_above: float | None = field(
        default=None, metadata={"help": "of --compare: exit 4 where a latency grew by more than this percentage"}
    )
    out: Path | None = field(
        default=None, metadata={"help": "folder for report.html, latency.png, profile.json, profile.csv"}
    )
    overwrite: bool = field(default=False, metadata={"help": "write into --out although it is not empty"})

    def __post_init__(self) -> None:
        self._check_mode()
        for flag, sizes in (("--batch-sizes", self.batch_sizes), ("--img-sizes", self.img_sizes)):
            if min(sizes, default=1) < 1 or (not sizes and flag == "--batch-sizes"):
                raise UsageError(f"`{flag}` {_show(sizes)}: give whole numbers from 1 on, such as 1,8")
        if self.img_size is not None and self.img_sizes:
            raise UsageError("`--img-size` and `--img-sizes` exclude each other; give one of them")
        lists = (("--batch-sizes", self.batch_sizes), ("--backends", self.backends), ("--img-sizes", self.img_sizes))
        for flag, values in lists:
            if len(set(values)) < len(values):
                raise UsageError(f"`{flag}` {_show(values)} names one of them twice; name each once")
        if self.num_classes is not None and self.num_classes < 1:
            raise UsageError(f"`--num-classes` {self.num_classes}: give a whole number of at least 1")
        check_threads(self.threads)
        if not _is_positive(self.duration):
            raise UsageError(f"`--duration` {self.duration}: give seconds above 0")
        if not _is_positive(self.stability):
            raise UsageError(f"`--stability` {self.stability}: give a percentage above 0")
        if self.budget_ms is not None and not _is_positive(self.budget_ms):
            raise UsageError(f"`--budget-ms` {self.budget_ms}: give milliseconds above 0")
        if self.tasks and not {"bank", "bank+graph"} & set(self.backends):
            raise UsageError(f"`--tasks` {_show(self.tasks)} is for the back-end `bank`; add it to --backends")
        check_seed(self.seed)
        kind, _, index = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (":" in self.device and (kind != "cuda" or not index.isdigit())):
            raise UsageError(f"`--device` {self.device}: choose auto, cpu, cuda or cuda:N")

    def _check_mode(self) -> None:
        """Refuse what does not go with measuring a source, with ceilings alone or with a comparison."""
        if self.fail_above is not None and (not self.compare or not _is_positive(self.fail_above)):
            raise UsageError(f"`--fail-above` {self.fail_above}: give a percentage above 0, together with --compare")
        if self.compare and (len(self.compare) != 2 or self.source):
            raise UsageError(f"`--compare` {_show(self.compare)}: give two profile.json, old and new, and no source")
        alone = self.ceilings and self.source == "" and not self.compare
        if not str(self.source).strip() and not self.compare and not alone:
            raise UsageError("`source` is empty; give a task pack, a checkpoint, an .onnx file or a timm model name")
        if not self.compare and not alone:
            return
        mode = "--compare" if self.compare else "--ceilings without a source"
        given = {
            "--out": self.out, "--img-sizes": self.img_sizes, "--img-size": self.img_size, "--tasks": self.tasks,
            "--budget-ms": self.budget_ms, "--backends": self.backends, "--reference": self.reference,
            "--ceilings": self.compare and self.ceilings,
        }  # fmt: skip
        if idle := [flag for flag, value in given.items() if value]:
            raise UsageError(f"`{mode}` measures no model, so {' and '.join(idle)} would do nothing; leave it out")


def check_seed(seed: int) -> None:
    """Refuse what torch's and NumPy's generators do not take.

    Raises:
        UsageError: below 0, or above 63 bits.
    """
    if not 0 <= seed < 1 << 63:
        raise UsageError(f"`--seed` {seed}: give a whole number from 0 to 2^63 - 1")


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _show(values: tuple[object, ...]) -> str:
    return ",".join(map(str, values)) or "(nothing)"
