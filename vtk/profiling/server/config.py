"""Options of ``vtk profile --server``."""

import urllib.parse
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.shared import Base, BudgetMs, MaybeOut, Overwrite, Reference, Seed, Stability

MAX_CLIENTS = 1024
"""Most threads of a closed loop."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig(Config):
    """Which server to drive, how hard, and where the report goes.

    Raises:
        UsageError: a value is out of range or named twice.
    """

    GROUP: ClassVar[str] = "measure"

    server: Annotated[
        str, Option("host:port of a server that is up, or a URL", "server", often=True, nonempty=True,
                    allowed="host:port, such as 127.0.0.1:8000")
    ]  # fmt: skip
    model: Annotated[str, Option("model's name on the server (default: the only one there)", "server", often=True)] = ""
    protocol: Annotated[Literal["http", "grpc"], Option("KServe v2 over HTTP or gRPC", "server", often=True)] = "http"
    task: Annotated[
        str | None, Option("value of the input `task`, of a model for many tasks", "server", often=True)
    ] = None
    batch_sizes: Annotated[
        tuple[int, ...], Option("images per request", often=True, least=1, unique=True, nonempty=True)
    ] = (1,)
    concurrency: Annotated[
        tuple[int, ...] | None,
        Option("closed loop: number of clients (default: 1,4,16; searched with --budget-ms)", often=True, least=1,
               unique=True),
    ] = None  # fmt: skip
    rate: Annotated[
        tuple[float, ...],
        Option("open loop: requests per second at random times (Poisson)", often=True, above=0, unique=True),
    ] = ()
    duration: Annotated[float, Option("seconds of each level", often=True, above=0)] = 5.0
    stability: Stability = 10.0
    budget_ms: BudgetMs = None
    reference: Reference = None
    base: Base = None
    img_size: Annotated[
        int | tuple[int, int] | None,
        Option("image size, where neither server nor reference says: one side, or height and width", "source", least=1),
    ] = None
    timeout: Annotated[float, Option("seconds from sending a request to the last byte of its answer", above=0)] = 30.0
    seed: Seed = 0
    out: MaybeOut = None
    overwrite: Overwrite = False

    def check(self) -> None:
        """Refuse options that contradict each other."""
        split_server(self.server)
        clients = self.concurrency or ()
        if max(clients, default=1) > MAX_CLIENTS:
            told = ",".join(map(str, clients))
            raise UsageError(f"`--concurrency` {told}: at most {MAX_CLIENTS}, a thread each; for more give --rate")
        if self.concurrency == () and not self.rate:
            raise UsageError("nothing to do: give `--batch-sizes`, and `--concurrency` or `--rate`")

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


@dataclass(frozen=True)
class Place:
    """Where a server is.

    Attributes:
        host: name or address.
        port: None for the protocol's own.
        secure: ``https``.
        prefix: of every path.
    """

    host: str
    port: int | None
    secure: bool
    prefix: str


def split_server(text: str) -> Place:
    """Return what ``host:port`` or a URL says.

    Raises:
        UsageError: it is neither.
    """
    try:
        parts = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:  # half a bracket, a port beyond 65535
        raise UsageError(f"`--server` {text} is no address ({error}); give host:port or a URL") from error
    if not host or parts.scheme not in ("http", "https", "grpc") or any(c.isspace() for c in parts.netloc + parts.path):
        raise UsageError(f"`--server` {text} is no address; give host:port, or a URL with http or https")
    return Place(host, port, parts.scheme == "https", urllib.parse.quote(parts.path.rstrip("/"), safe="/%~"))
