"""How a run works: number formats, devices, and how it goes on."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.shared import Device, EvalBatch, Seed, Workers


@dataclass(frozen=True, kw_only=True)
class RunningOptions(Config):
    """Number formats, device, seed, and how the run goes on."""

    GROUP: ClassVar[str] = "running"

    grad_checkpointing: Annotated[
        bool, Option("gradient checkpointing: recompute each block in the backward pass", "memory")
    ] = False
    compile: Annotated[bool, Option("torch.compile the training steps; needs a C++ compiler")] = False
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"],
        Option("auto: bf16 on CUDA, fp32 elsewhere; fp16 scales the loss and needs CUDA"),
    ] = "auto"
    eval_batch_size: EvalBatch = 64
    device: Device = "auto"
    workers: Workers = None
    seed: Seed = 0
    stop_after: Annotated[
        int | None, Option("stop after this many epochs of the plan; --resume goes on from there", least=1)
    ] = None
    resume: Annotated[bool, Option("continue the run in --out after its last whole epoch", "output", often=True)] = (
        False
    )
    overwrite: Annotated[bool, Option("replace the results of an earlier run in --out", "output", often=True)] = False

    def _check_running(self) -> None:
        if self.resume and self.overwrite:
            raise UsageError("`--resume` continues a run and `--overwrite` replaces it; give one of them")


@dataclass(frozen=True, kw_only=True)
class DryRunOptions(Config):
    """A look at a run before it starts."""

    GROUP: ClassVar[str] = "running"

    dry_run: Annotated[bool, Option("show the memory that each mode takes; train nothing", "memory", often=True)] = (
        False
    )
