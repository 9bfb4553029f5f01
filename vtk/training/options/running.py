"""Options of running: number formats, device, saving and resuming, trials."""

import re
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.shared import Device, Seed, Workers

GraphChoice = Literal["auto", "on", "off"]
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = r"(?P<time>\d*[1-9]\d*(\.\d+)?|0?\.\d*[1-9]\d*) ?(?P<unit>s|min|h)"
_INTERVAL = re.compile(rf"(?P<steps>[1-9]\d*)( ?steps?)?|{_TIME}")


@dataclass(frozen=True)
class Interval:
    """An interval in optimizer steps or in time.

    Attributes:
        steps: None where it is a time.
        seconds: None where it is a number of steps.
    """

    steps: int | None = None
    seconds: float | None = None


def parse_interval(text: str | None) -> Interval | None:
    """Return the interval of ``500``, ``500steps``, ``90s``, ``10min`` or ``1.5h``; None for None."""
    if text is None:
        return None
    found = _INTERVAL.fullmatch(text)
    assert found is not None, text  # the option's pattern
    if found["steps"]:
        return Interval(steps=int(found["steps"]))
    return Interval(seconds=float(found["time"]) * _UNITS[found["unit"]])


@dataclass(frozen=True, kw_only=True)
class RunningOptions(Config):
    """Number formats, device, seed, saving and resuming."""

    GROUP: ClassVar[str] = "running"

    grad_checkpointing: Annotated[
        bool, Option("gradient checkpointing: recompute each block in the backward pass", "memory")
    ] = False
    compile: Annotated[bool, Option("torch.compile the training steps; needs a C++ compiler")] = False
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"],
        Option("auto: bf16 on CUDA, fp32 elsewhere; fp16 scales the loss and needs CUDA"),
    ] = "auto"
    eval_batch_size: Annotated[int, Option("images per forward pass in evaluation", least=1)] = 64
    device: Device = "auto"
    workers: Workers = None
    seed: Seed = 0
    stop_after: Annotated[
        int | None, Option("stop after N more epochs of the plan; continue with --resume", least=1)
    ] = None
    save_every: Annotated[
        str | None,
        Option(
            "also save within epochs: every N optimizer steps (500), or after a time (10min)",
            "output",
            convert=str,
            pattern=_INTERVAL.pattern,
            allowed="optimizer steps, such as 500, or a time, such as 90s, 10min or 1.5h",
        ),
    ] = None
    resume: Annotated[bool, Option("continue the run in --out from its last save", "output", often=True)] = False
    overwrite: Annotated[bool, Option("replace an earlier run in --out", "output", often=True)] = False

    def _check_running(self) -> None:
        if self.resume and self.overwrite:
            raise UsageError("`--resume` continues a run and `--overwrite` replaces it; give one of them")


@dataclass(frozen=True, kw_only=True)
class GraphOptions(Config):
    """CUDA graphs."""

    GROUP: ClassVar[str] = "running"

    cuda_graph: Annotated[
        GraphChoice,
        Option("run a training step as one CUDA graph; auto: on a GPU, where possible"),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class DryRunOptions(Config):
    """Preview of a run before it starts."""

    GROUP: ClassVar[str] = "running"

    dry_run: Annotated[bool, Option("show images, memory and estimated time; train nothing", "memory", often=True)] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class TrialOptions(Config):
    """Trial runs: a subset of the images, or a few steps."""

    GROUP: ClassVar[str] = "schedule"

    limit: Annotated[
        int | None,
        Option(
            "trial run: at most N training and N held-out images, classes in proportion", "data", least=1, metavar="N"
        ),
    ] = None
    max_steps: Annotated[
        int | None,
        Option("trial run: N optimizer steps, with the schedule of N steps", least=1, metavar="N"),
    ] = None

    @property
    def trial(self) -> dict[str, int]:
        """Limits of a trial run, for cards, metrics and results; empty for a full run."""
        found = {"limit": self.limit, "max_steps": self.max_steps}
        return {name: value for name, value in found.items() if value is not None}
