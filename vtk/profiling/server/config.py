"""Options of ``vtk profile --server``."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vtk.errors import UsageError
from vtk.profiling.config import check_seed

MAX_CLIENTS = 1024
"""Most threads of a closed loop."""


@dataclass(frozen=True)
class ServerConfig:
    """Which server to drive, how hard, and where the report goes.

    Raises:
        UsageError: a value is out of range or named twice.
    """

    server: str = field(metadata={"help": "host:port of a server that is up, or a URL"})
    model: str = field(default="", metadata={"help": "its name on the server; by default the only one there"})
    protocol: Literal["http", "grpc"] = field(default="http", metadata={"help": "KServe v2 over HTTP or gRPC"})
    task: str | None = field(default=None, metadata={"help": "of a model for many tasks: what its input `task` is"})
    batch_sizes: tuple[int, ...] = field(default=(1,), metadata={"help": "images per request"})
    concurrency: tuple[int, ...] | None = field(
        default=None,
        metadata={"help": "closed loop: so many clients, each sends when it has its answer. By default 1, 4, 16; with "
                          "--budget-ms doubled from 1 on until the budget is missed, and narrowed down"},
    )  # fmt: skip
    rate: tuple[float, ...] = field(
        default=(),
        metadata={"help": "open loop: so many requests a second at random times (Poisson), whatever the server does"},
    )
    duration: float = field(default=5.0, metadata={"help": "seconds of each level"})
    stability: float = field(
        default=10.0, metadata={"help": "percent within which the last three windows' medians agree in a stable level"}
    )
    budget_ms: float | None = field(
        default=None,
        metadata={"help": "latency budget of a request: finds batch and concurrency that meet it with most images/s"},
    )
    reference: str | None = field(
        default=None, metadata={"help": "pack, checkpoint or model that answers are compared with; else not compared"}
    )
    base: Path | None = field(default=None, metadata={"help": "base weights of the reference, a pack"})
    img_size: int | tuple[int, int] | None = field(
        default=None, metadata={"help": "of the images, where neither server nor reference tells: N, or height, width"}
    )
    timeout: float = field(default=30.0, metadata={"help": "seconds after which an answer counts as failed"})
    seed: int = field(default=0, metadata={"help": "of the random images and arrivals"})
    out: Path | None = field(default=None, metadata={"help": "folder for server.html and server.json"})
    overwrite: bool = field(default=False, metadata={"help": "write into --out although it is not empty"})

    def __post_init__(self) -> None:
        if not self.server.strip():
            raise UsageError("`--server` is empty; give host:port, such as 127.0.0.1:8000")
        clients = self.concurrency or ()
        for flag, values in (("--batch-sizes", self.batch_sizes), ("--concurrency", clients)):
            if min(values, default=1) < 1 or len(set(values)) < len(values):
                raise UsageError(f"`{flag}` {_show(values)}: give different whole numbers from 1 on")
        if max(clients, default=1) > MAX_CLIENTS:
            raise UsageError(f"`--concurrency` {_show(clients)}: at most {MAX_CLIENTS}, a thread each; for more users "
                             "give --rate")  # fmt: skip
        if not self.batch_sizes or (self.concurrency == () and not self.rate):
            raise UsageError("nothing to do: give `--batch-sizes`, and `--concurrency` or `--rate`")
        if any(not _is_positive(r) for r in self.rate) or len(set(self.rate)) < len(self.rate):
            raise UsageError(f"`--rate` {_show(self.rate)}: give different requests per second above 0")
        for flag in ("duration", "stability", "timeout"):
            if not _is_positive(getattr(self, flag)):
                raise UsageError(f"`--{flag}` {getattr(self, flag)}: give a number above 0")
        check_seed(self.seed)
        if self.budget_ms is not None and not _is_positive(self.budget_ms):
            raise UsageError(f"`--budget-ms` {self.budget_ms}: give milliseconds above 0")

    @property
    def clients(self) -> tuple[int, ...]:
        """Closed loops to measure; none where they are searched for, or only open ones were asked for."""
        if self.concurrency is not None:
            return self.concurrency
        return () if self.searches or self.rate else (1, 4, 16)

    @property
    def searches(self) -> bool:
        """Whether the concurrency that meets the budget is to be found."""
        return self.budget_ms is not None and self.concurrency is None and not self.rate


def _is_positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _show(values: tuple[object, ...]) -> str:
    return ",".join(map(str, values)) or "(nothing)"
