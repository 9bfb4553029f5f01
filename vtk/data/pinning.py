"""Keeps a process on some of its cores: ``--cpus 0-3``.

Every thread is moved, also those that libraries made before; threads and worker processes that start later inherit the
cores of the one that starts them. What runs on other cores at the same time is not touched.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from vtk.errors import UnavailableError, UsageError

_TASKS = Path("/proc/self/task")


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the numbers in ``0-3,8``, ascending, each once."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if high < low:
            raise UsageError(f"`--cpus` {text}: {part} runs backwards; give {last}-{first}")
        if high > low + 4095:
            raise UsageError(f"`--cpus` {text}: {part} is more cores than any machine has; give those to run on")
        cores.update(range(low, high + 1))
    return tuple(sorted(cores))


def show_cores(cores: Iterable[int]) -> str:
    """Return ``0-3,8`` for 0, 1, 2, 3 and 8."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


@contextlib.contextmanager
def pinned(cpus: str | None, threads: int | None) -> Iterator[int | None]:
    """Run the block on these cores alone, and yield how many threads it is to use.

    Args:
        cpus: such as ``0-3``; None for all that the process may use.
        threads: that were requested; None for one on each core, or where no cores are given for torch's choice.

    Raises:
        UsageError: cores that this process may not use, or more threads than cores.
        UnavailableError: a system that pins no threads.
    """
    if cpus is None:
        yield threads
        return
    wanted = parse_cores(cpus)
    if not hasattr(os, "sched_setaffinity"):
        raise UnavailableError("`--cpus` pins threads, which only Linux lets a process do itself; leave it out")
    before = os.sched_getaffinity(0)
    if absent := set(wanted) - before:
        raise UsageError(
            f"`--cpus` {cpus}: this process may use the cores {show_cores(before)}, not {show_cores(absent)}; "
            "give some of those"
        )
    if threads is not None and threads > len(wanted):
        raise UsageError(
            f"`--threads` {threads} is more than the cores of `--cpus` {cpus}, {len(wanted)}: they would wait for one "
            "another; give more cores or fewer threads"
        )
    earlier = {task: os.sched_getaffinity(task) for task in _tasks()}
    _move(earlier, wanted)
    try:
        yield threads or len(wanted)
    finally:
        for task in _tasks():
            _move([task], earlier.get(task, before))


def _tasks() -> list[int]:
    return [int(entry.name) for entry in _TASKS.iterdir()] if _TASKS.is_dir() else [0]


def _move(tasks: Iterable[int], cores: Iterable[int]) -> None:
    for task in tasks:
        with contextlib.suppress(ProcessLookupError):  # it ended in between
            os.sched_setaffinity(task, cores)
