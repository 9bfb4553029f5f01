"""Closed and open loops of requests, and their latencies.

Closed: so many clients, each sends its next request when it has its answer. A server that stalls is asked less often
while it stalls, so few requests see the stall (coordinated omission): the percentiles flatter it.

Open: requests arrive at random times that do not depend on the server (a Poisson process), as those of many users do.
Each time is taken from the moment the request was due, not from the moment it could be sent: a stall then counts for
everyone who would have come in meanwhile.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vtk.profiling.server.answers import Sample
from vtk.profiling.server.client import RequestFailed
from vtk.profiling.stats import spread

MAX_IN_FLIGHT = 256
"""Threads of an open loop: so many requests can be under way; later ones wait here, and their waiting counts."""

LATE_S = 0.001
"""A request that was sent later than this after it was due was late: this machine could not keep up."""

AHEAD_S = 0.02
"""A request of an open loop is encoded so long before it is due; earlier, those of all threads would be in memory."""

GIVE_UP = 100
"""After so many failures in a row, with no answer in between, a load ends: the server is gone."""

Make = Callable[[int], Any]
"""Encode the request of this number."""

Send = Callable[[Any], Any]
"""Send what `Make` returned, return the answer; raises `RequestFailed`."""


@dataclass
class Run:
    """What a loop saw.

    Attributes:
        latencies: seconds of each answered request, in the order of the answers.
        finished: when each came, seconds after the start.
        service: seconds from sending to answer; in a closed loop the same as `latencies`.
        failed: one line for each failed request.
        late: requests of an open loop that were sent late.
        in_a_row: failures since the last answer.
        seconds: how long it ran.
    """

    latencies: list[float] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)
    service: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    late: int = 0
    in_a_row: int = 0
    seconds: float = 0.0

    def windows(self, count: int = 5) -> list[list[float]]:
        """Return the latencies in ``count`` stretches of time, without empty ones."""
        found: list[list[float]] = [[] for _ in range(count)]
        for latency, end in zip(self.latencies, self.finished, strict=True):
            found[min(int(count * end / max(self.seconds, 1e-9)), count - 1)].append(latency)
        return [window for window in found if window]

    @property
    def gone(self) -> bool:
        """Whether nothing is answered any more."""
        return self.in_a_row >= GIVE_UP

    def spread(self) -> float | None:
        """Return by which fraction the medians of the last three windows differ."""
        return spread(self.windows())


def closed_loop(
    send: Send, clients: int, duration_s: float, *, make: Make = int, numbers: Iterator[int] | None = None,
    sample: Sample | None = None,
) -> Run:  # fmt: skip
    """Let ``clients`` threads send one request after the other for ``duration_s`` seconds.

    Args:
        send: is timed.
        clients: threads.
        duration_s: no request is begun later.
        make: is not timed.
        numbers: of the requests; each is used once.
        sample: is offered every answer.
    """
    run, lock, numbers = Run(), threading.Lock(), numbers or itertools.count()
    start = time.perf_counter()
    end = start + duration_s

    def client(_: int) -> None:
        while time.perf_counter() < end and not run.gone:
            number = next(numbers)
            request = make(number)
            begin = time.perf_counter()
            _one(run, lock, send, request, number, start, begin, begin, sample)

    _in_threads(client, clients)
    run.seconds = time.perf_counter() - start
    return run


def open_loop(
    send: Send, rate: float, duration_s: float, *, seed: int = 0, make: Make = int,
    numbers: Iterator[int] | None = None, sample: Sample | None = None,
) -> Run:  # fmt: skip
    """Send requests that are due at random times, ``rate`` a second on average, for ``duration_s`` seconds.

    Other arguments as of `closed_loop`.
    """
    due = arrivals(rate, duration_s, seed)
    run, lock, numbers = Run(), threading.Lock(), numbers or itertools.count()
    waiting = iter(range(len(due)))
    start = time.perf_counter()

    def worker(_: int) -> None:
        while True:
            with lock:
                turn = next(waiting, None)
            if turn is None or run.gone:
                return
            number, moment = next(numbers), start + due[turn]
            _until(moment - AHEAD_S)
            request = make(number)
            _until(moment)
            begin = time.perf_counter()
            if begin - moment > LATE_S:
                with lock:
                    run.late += 1
            _one(run, lock, send, request, number, start, moment, begin, sample)

    _in_threads(worker, min(MAX_IN_FLIGHT, max(1, len(due))))
    run.seconds = time.perf_counter() - start
    return run


def arrivals(rate: float, duration_s: float, seed: int) -> Sequence[float]:
    """Return the moments of a Poisson process in [0, duration_s): its gaps are exponentially distributed."""
    source, moment, found = random.Random(seed), 0.0, []
    while (moment := moment + source.expovariate(rate)) < duration_s:
        found.append(moment)
    return found


def _one(
    run: Run, lock: threading.Lock, send: Send, request: Any, number: int, start: float, due: float, begin: float,
    sample: Sample | None,
) -> None:  # fmt: skip
    try:
        answer = send(request)
    except RequestFailed as error:
        with lock:
            run.failed.append(str(error))
            run.in_a_row += 1
        return
    now = time.perf_counter()
    with lock:
        run.in_a_row = 0
        run.latencies.append(now - due)
        run.service.append(now - begin)
        run.finished.append(now - start)
        if sample is not None:
            sample.offer(number, answer)


def _until(moment: float) -> None:
    if (rest := moment - time.perf_counter()) > 0:
        time.sleep(rest)


def _in_threads(work: Callable[[int], None], count: int) -> None:
    """Run ``work(0)`` … ``work(count - 1)`` at the same time; an error of one is raised here."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
