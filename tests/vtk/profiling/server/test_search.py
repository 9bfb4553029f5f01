"""The search for the concurrency that meets a budget, on servers whose latency is a formula."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from vtk.profiling.server.result import ServerLevel
from vtk.profiling.server.search import search


def server(latency: Callable[[int], float], **more: object) -> Callable[[ServerLevel], ServerLevel]:
    """Answer with ``latency(clients)`` ms; by Little's law clients / latency requests a second come out."""

    def measure(level: ServerLevel) -> ServerLevel:
        clients = level.concurrency or 0
        ms = latency(clients)
        times = {"p50_ms": ms / 2, "p90_ms": ms * 0.9, "p99_ms": ms}
        return replace(level, requests=5000, images_per_second=1000 * level.batch * clients / ms, **times, **more)  # type: ignore[arg-type]

    return measure


@pytest.mark.parametrize(("latency", "budget", "tried"), [
    # one worker at 5 ms each: p99 is 5 n, more clients bring nothing; two doublings show it
    (lambda n: 5.0 * n, 1000.0, [1, 2, 4]),
    # grows freely up to 10 clients, then queues: missed at 16, 12 too, 10 still meets it
    (lambda n: 10.0 if n <= 10 else 50.0, 20.0, [1, 2, 4, 8, 16, 12, 10]),
    (lambda n: 30.0, 20.0, [1]),
    (lambda n: 10.0 if n == 1 else 30.0, 20.0, [1, 2]),
    (lambda n: 10.0, 20.0, [1, 2, 4, 8, 16, 32, 64, 128, 256]),
], ids=["saturated", "narrowed", "never", "only one", "never missed"])  # fmt: skip
def test_clients_that_are_tried(latency: Callable[[int], float], budget: float, tried: list[int]) -> None:
    levels: list[ServerLevel] = []
    search(server(latency), 1, budget, levels)
    assert [level.concurrency for level in levels] == tried


@pytest.mark.parametrize("more", [{"failed": 3}, {"status": "mismatch"}], ids=["failures", "wrong answers"])
def test_what_is_not_answered_rightly_does_not_meet_it(more: dict[str, object]) -> None:
    levels: list[ServerLevel] = []
    search(server(lambda n: 1.0, **more), 4, 100.0, levels)
    assert [level.concurrency for level in levels] == [1] and levels[0].batch == 4
