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
    """Server, load and output of a load test.

    Raises:
        UsageError: a value is out of range or named twice.
    """

    GROUP: ClassVar[str] = "measure"

    server: Annotated[
        str, Option("address of a running server: host:port or URL", "server", often=True, nonempty=True,
                    allowed="host:port, such as 127.0.0.1:8000")
    ]  # fmt: skip
    model: Annotated[str, Option("model name on the server (default: its only model)", "server", often=True)] = ""
    protocol: Annotated[Literal["http", "grpc"], Option("KServe v2 over HTTP or gRPC", "server", often=True)] = "http"
    task: Annotated[str | None, Option("value of the input `task`, for a multi-task model", "server", often=True)] = (
        None
    )
    batch_sizes: Annotated[
        tuple[int, ...], Option("images per request", often=True, least=1, unique=True, nonempty=True)
    ] = (1,)
    concurrency: Annotated[
        tuple[int, ...] | None,
        Option("closed loop: numbers of clients (default: 1,4,16; with --budget-ms a search)", often=True, least=1,
               unique=True),
    ] = None  # fmt: skip
    rate: Annotated[
        tuple[float, ...],
        Option("open loop: requests per second, Poisson arrivals", often=True, above=0, unique=True),
    ] = ()
    duration: Annotated[float, Option("seconds per load level", often=True, above=0)] = 5.0
    stability: Stability = 10.0
    budget_ms: BudgetMs = None
    reference: Reference = None
    base: Base = None
    img_size: Annotated[
        int | tuple[int, int] | None,
        Option(
            "image size if neither server nor reference defines it: one side, or height and width", "source", least=1
        ),
    ] = None
    timeout: Annotated[
        float, Option("timeout in seconds, from sending a request to the last byte of its answer", above=0)
    ] = 30.0
    seed: Seed = 0
    out: MaybeOut = None
    overwrite: Overwrite = False

    def check(self) -> None:
        """Refuse options that contradict each other."""
        split_server(self.server)
        clients = self.concurrency or ()
        if max(clients, default=1) > MAX_CLIENTS:
            given = ",".join(map(str, clients))
            raise UsageError(f"`--concurrency` {given}: at most {MAX_CLIENTS}, a thread each; for more give --rate")
        if self.concurrency == () and not self.rate:
            raise UsageError("nothing to do: give `--batch-sizes`, and `--concurrency` or `--rate`")

    @property
    def clients(self) -> tuple[int, ...]:
        """Numbers of clients to measure; none with a search, or with open loops only."""
        if self.concurrency is not None:
            return self.concurrency
        return () if self.searches or self.rate else (1, 4, 16)

    @property
    def searches(self) -> bool:
        """Whether to search for the concurrency that meets the budget."""
        return self.budget_ms is not None and self.concurrency is None and not self.rate


@dataclass(frozen=True)
class Place:
    """Address of a server.

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
    """Parse ``host:port`` or a URL.

    Raises:
        UsageError: it is neither.
    """
    try:
        parts = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:  # half a bracket, a port beyond 65535
        raise UsageError(f"`--server` {text} is not a valid address ({error}); give host:port or a URL") from error
    if not host or parts.scheme not in ("http", "https", "grpc") or any(c.isspace() for c in parts.netloc + parts.path):
        raise UsageError(f"`--server` {text} is not a valid address; give host:port, or a URL with http or https")
    return Place(host, port, parts.scheme == "https", urllib.parse.quote(parts.path.rstrip("/"), safe="/%~"))
