"""Number of CPUs that a process may use, and batches loaded in threads ahead of the model."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def batches_ahead(items: Sequence[T], load: Callable[[T], R], size: int) -> Iterator[list[R]]:
    """Yield the results of ``load`` for ``items`` in order, in batches of ``size``, while the next batch is loaded."""
    with ThreadPoolExecutor(min(usable_cpus(), 8)) as pool:
        waiting = None
        for start in range(0, len(items), size):
            coming = [pool.submit(load, item) for item in items[start : start + size]]
            if waiting is not None:
                yield [future.result() for future in waiting]
            waiting = coming
        if waiting is not None:
            yield [future.result() for future in waiting]
