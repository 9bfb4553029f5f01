"""How a run works: number formats, devices, and how it goes on."""

from dataclasses import dataclass, field
from typing import Literal

from vtk.errors import UsageError
from vtk.training.options.checks import require


@dataclass(frozen=True)
class RunningOptions:
    """Number formats, device, seed, and how the run goes on."""

    grad_checkpointing: bool = field(default=False, metadata={"help": "compute each block twice and keep less memory"})
    compile: bool = field(
        default=False,
        metadata={"help": "torch.compile for training steps: the first ones wait for it; needs a C++ compiler"},
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = field(
        default="auto",
        metadata={"help": "auto is bf16 on CUDA and fp32 elsewhere; fp16 scales the loss and needs CUDA"},
    )

    eval_batch_size: int = field(default=64, metadata={"help": "images per forward pass of the evaluation"})
    device: str = field(default="auto", metadata={"help": "auto, cpu, cuda or cuda:N"})
    workers: int | None = field(
        default=None,
        metadata={"help": "processes that load images; default the number of CPU cores, at most 8"},
    )
    seed: int = field(default=0, metadata={"help": "of the split, the order, the augmentation and the new head"})
    stop_after: int | None = field(
        default=None,
        metadata={"help": "stop after this many epochs of the plan; --resume goes on from there"},
    )
    dry_run: bool = field(default=False, metadata={"help": "show the memory that each mode takes; train nothing"})
    resume: bool = field(default=False, metadata={"help": "continue the run in --out after its last whole epoch"})
    overwrite: bool = field(default=False, metadata={"help": "replace the results of an earlier run in --out"})

    def _check_running(self) -> None:
        precision: str = self.precision
        if precision not in ("auto", "fp32", "bf16", "fp16"):
            raise UsageError(f"`--precision` {precision} is not known; choose auto, fp32, bf16 or fp16")
        if self.resume and self.overwrite:
            raise UsageError("`--resume` continues a run and `--overwrite` replaces it; give one of them")
        require(0 <= self.seed < 1 << 32, "seed", self.seed, "from 0 to 4294967295")
        size = self.eval_batch_size
        require(isinstance(size, int) and size >= 1, "eval_batch_size", size, "at least 1")
        require(self.stop_after is None or self.stop_after >= 1, "stop_after", self.stop_after, "at least 1")
        require(self.workers is None or 0 <= self.workers <= 1024, "workers", self.workers, "0 to 1024")
