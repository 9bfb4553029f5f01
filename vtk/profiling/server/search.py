"""Searches for the concurrency with the highest throughput within a latency budget."""

from collections.abc import Callable

from vtk.profiling.budget import Candidate
from vtk.profiling.server.load import MAX_IN_FLIGHT
from vtk.profiling.server.result import ServerLevel

GAIN = 1.05
"""A doubled number of clients that answers less than 5 % more is beyond what the server can do."""

NARROW = 2
"""Numbers of clients that are tried between the last that met the budget and the first that did not."""


def search(
    measure: Callable[[ServerLevel], ServerLevel], batch: int, budget_ms: float, levels: list[ServerLevel]
) -> None:
    """Double the clients from 1 on until the budget is missed or they bring nothing more, then narrow down.

    Args:
        measure: fills in a level.
        batch: images per request.
        budget_ms: milliseconds of the highest percentile that is known.
        levels: each is added as soon as it is measured, so that what was found outlives a Ctrl-C.
    """

    def run(clients: int) -> ServerLevel:
        levels.append(measure(ServerLevel(batch, "closed", clients)))
        return levels[-1]

    best, rate, idle, clients, missed = 0, 0.0, 0, 1, 0
    while clients <= MAX_IN_FLIGHT:
        level = run(clients)
        if not _meets(level, budget_ms):
            missed = clients
            break
        best, now = clients, level.images_per_second or 0.0
        # one doubling may be noise, two are not
        idle = 0 if now > GAIN * rate else idle + 1
        if idle == 2:
            return
        rate, clients = max(rate, now), 2 * clients
    for _ in range(NARROW):
        between = (best + missed) // 2
        if not best or not missed or between in (best, missed):
            return
        if _meets(run(between), budget_ms):
            best = between
        else:
            missed = between


def _meets(level: ServerLevel, budget_ms: float) -> bool:
    """Return whether a level was answered, rightly and without failures, within the budget."""
    if level.status != "ok" or level.failed:
        return False
    known = Candidate("", level.batch, "", level.p50_ms, level.p90_ms, level.p99_ms, 0.0).judged()
    return known is not None and known[1] <= budget_ms
