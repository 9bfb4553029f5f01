"""Warm-up and timing of calls: each is timed until the device is done."""

import time
from collections.abc import Callable

MIN_RUNS = 10

WARMUP_RUNS = 3
WARMUP_S = 0.5
"""Untimed calls before every cell: at least 3 of them and half a second (or the cell's duration, if shorter)."""


def warm_up(
    call: Callable[[], object], synchronize: Callable[[], None], duration_s: float, *, runs: int = WARMUP_RUNS
) -> None:
    """Call at least ``runs`` times and ``duration_s`` seconds, until caches, clocks and autotuners have settled."""
    end = time.perf_counter() + duration_s
    done = 0
    while done < runs or time.perf_counter() < end:
        call()
        synchronize()
        done += 1


def time_calls(
    call: Callable[[], object], synchronize: Callable[[], None], duration_s: float, *, least: int = MIN_RUNS
) -> list[float]:
    """Return the wall time in seconds of each call, from start until the device is done.

    Stops after ``duration_s`` seconds, but not before ``least`` calls.
    """
    clock = time.perf_counter
    seconds: list[float] = []
    synchronize()
    end = clock() + duration_s
    while True:
        start = clock()
        call()
        synchronize()
        now = clock()
        seconds.append(now - start)
        if now >= end and len(seconds) >= least:
            return seconds


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, short enough for a table."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if len(text) <= 200 else text[:199] + "…"
