"""Decoding in threads, one batch ahead of the model."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from vtk.data.pool import usable_cpus

T = TypeVar("T")
R = TypeVar("R")


def batches_ahead(items: Sequence[T], load: Callable[[T], R], size: int) -> Iterator[list[R]]:
    """Yield what ``load`` makes of ``items``, ``size`` at a time and in order, while the next ones are being loaded."""
    with ThreadPoolExecutor(min(usable_cpus(), 8)) as pool:
        waiting = None
        for start in range(0, len(items), size):
            coming = [pool.submit(load, item) for item in items[start : start + size]]
            if waiting is not None:
                yield [future.result() for future in waiting]
            waiting = coming
        if waiting is not None:
            yield [future.result() for future in waiting]
