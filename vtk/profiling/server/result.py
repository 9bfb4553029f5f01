"""The result of a load test: plain values, and what follows from them."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from vtk.profiling.budget import Candidate, Choice, choose

SCHEMA = 2
"""Version of ``server.json``; version 1 had no `checked` and `wrong`."""

Loop = Literal["closed", "open"]


@dataclass(frozen=True)
class ServerLevel:
    """One load. Times are of answered requests, in milliseconds; None where there were too few.

    Attributes:
        batch: images per request.
        loop: closed: `concurrency` clients; open: `rate` requests a second.
        concurrency: of a closed loop.
        rate: asked for in an open loop.
        status: "ok", or "mismatch" for wrong answers, or "failed" where none came.
        reason: one line for every status but "ok".
        requests: answered.
        failed: not answered, or with an error.
        p50_ms: median; in an open loop counted from the moment that a request was due, as are the next three.
        p90_ms: None below 100 requests.
        p99_ms: None below 1,000 requests.
        mean_ms: of all.
        service_p50_ms: median from sending to answer, without waiting in this machine.
        requests_per_second: answered.
        images_per_second: the same times `batch`.
        queue_ms: mean time that a request waited in the server, by its own account; None where it keeps none.
        compute_ms: mean time that it was worked on.
        server_batch: images that the server ran at once, on average.
        late: fraction of an open loop's requests that this machine sent late.
        stable: whether the medians of the last three of five windows agree.
        spread: by which fraction they differ.
        max_diff: largest absolute difference from the reference, None if not compared.
        checked: answers, idle, in the warm-up and under load, that were compared with the right ones.
        wrong: of them.
    """

    batch: int
    loop: Loop
    concurrency: int | None = None
    rate: float | None = None
    status: Literal["ok", "mismatch", "failed"] = "ok"
    reason: str = ""
    requests: int = 0
    failed: int = 0
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    mean_ms: float | None = None
    service_p50_ms: float | None = None
    requests_per_second: float | None = None
    images_per_second: float | None = None
    queue_ms: float | None = None
    compute_ms: float | None = None
    server_batch: float | None = None
    late: float = 0.0
    stable: bool | None = None
    spread: float | None = None
    max_diff: float | None = None
    checked: int = 0
    wrong: int = 0

    @property
    def load(self) -> str:
        """The load in words."""
        if self.loop == "open":
            return f"{self.rate:g} req/s"
        return "1 client" if self.concurrency == 1 else f"{self.concurrency} clients"


@dataclass(frozen=True)
class ServerResult:
    """A whole run against one model of one server.

    Attributes:
        server: as given.
        protocol: http or grpc.
        model: on the server.
        version: that answered.
        platform: what runs it, in the server's words.
        reference: what answers were compared with, in words.
        inputs: what was sent.
        stability_pct: percent within which the windows of a stable level agree.
        levels: in the order they were measured.
        budget_ms: as asked for.
        stopped: somebody stopped it (Ctrl-C); what was measured by then is here.
        command: the command line.
        date: UTC, ISO 8601.
        schema: version of this layout.
    """

    server: str
    protocol: str
    model: str
    version: str
    platform: str
    reference: str
    inputs: str
    stability_pct: float
    levels: tuple[ServerLevel, ...]
    budget_ms: float | None = None
    stopped: bool = False
    command: str = ""
    date: str = ""
    schema: int = field(default=SCHEMA)

    @property
    def exit_code(self) -> int:
        """4 when an answer was wrong, 130 when stopped, 1 when requests failed, else 0."""
        if any(level.status == "mismatch" for level in self.levels):
            return 4
        if self.stopped:
            return 130
        return 1 if any(level.failed or level.status == "failed" for level in self.levels) else 0

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes numbers doubtful, one line each."""
        found = ["stopped early: loads are missing"] if self.stopped else []
        for level in self.levels:
            place = f"batch {level.batch}, {level.load}"
            if level.failed:
                found.append(
                    f"{place}: {level.failed} of {level.failed + level.requests} requests failed: {level.reason}"
                )
            if level.status != "ok":
                continue
            if level.stable is False:
                found.append(
                    f"{place}: unstable: the last three windows' medians differ by {100 * (level.spread or 0):.0f} %, "
                    f"allowed {self.stability_pct:g} %; use a longer --duration"
                )
            if level.late > 0.01:
                found.append(
                    f"{place}: {100 * level.late:.0f} % of the requests were sent late: the server, or this machine, "
                    "is beyond its rate; their waiting is in the times"
                )
        return tuple(found)

    @property
    def choice(self) -> Choice | None:
        """Batch and load that meet ``budget_ms`` with the most images per second, or are nearest to it."""
        if self.budget_ms is None:
            return None
        found = [
            Candidate(
                f"batch {level.batch} with {level.load}", level.batch, level.load, level.p50_ms, level.p90_ms,
                level.p99_ms, level.images_per_second or 0.0, level.stable,
            )
            for level in self.levels if level.status == "ok" and not level.failed
        ]  # fmt: skip
        return choose(self.budget_ms, found, none="no load")

    @property
    def budget(self) -> str:
        """`choice` in one line; empty without a budget."""
        if self.budget_ms is None:
            return ""
        return f"budget {self.budget_ms:g} ms: no load could be judged" if self.choice is None else self.choice.text

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        choice = None if self.choice is None else dataclasses.asdict(self.choice)
        derived = {"budget": self.budget, "choice": choice, "warnings": list(self.warnings)}
        return {**dataclasses.asdict(self), **derived, "exit_code": self.exit_code}
