"""The index of a model's tasks, read again when it was replaced; what goes wrong is said, and tried again.

Needs the server's own module, and `vtk_rows.py` beside it. A broken index, or a task of it that cannot be read, changes
nothing of what is served. It is tried again after 1, 2, 4 … seconds, at once when the index is another file, and each
failure is a line of the server's log at error level. Metrics (`/metrics`) say it to whoever does not read logs.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from vtk_rows import log  # type: ignore[import-not-found]

LONGEST_S = 60.0
"""Most seconds between two attempts."""

LARGEST = 64 << 20
"""Most bytes of an index."""

_METRICS = {
    "vtk_tasks": "Tasks that are served.",
    "vtk_tasks_wrong": "What could not be done of the index at the last attempt: 0 where all is served as it says.",
    "vtk_index_failures": "Attempts to follow the index that failed, since the model was loaded.",
    "vtk_index_looked_seconds": "When the index was last looked at, in seconds since 1970.",
}


class Index:
    """Knows when the index is to be read, and keeps account of failures.

    Attributes:
        path: of the file.
        wrong: what could not be done at the last attempt.
        failures: attempts that failed.
    """

    def __init__(self, path: Path, args: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self.wrong, self.failures = path, list[str](), 0
        self._name, self._clock = args.get("model_name", ""), clock
        self._seen: tuple[int, int, int] | None = None
        self._tried = False
        self._next, self._wait, self._looked = 0.0, 0.0, 0.0
        labels = {"model": "model_name", "version": "model_version", "instance": "model_instance_name"}
        self._metrics = _metrics({label: args.get(key, "") for label, key in labels.items()})

    def due(self) -> bool:
        """Return whether to read it: it is another file than at the last attempt, or a failure's wait is over."""
        mark = _mark(self.path)
        now = time.time()
        if abs(now - self._looked) >= 1:  # a clock may be set back
            self._looked = now
            self._set("vtk_index_looked_seconds", now)
        if not self._tried or mark != self._seen:
            self._tried, self._seen, self._wait = True, mark, 0.0
            return True
        return bool(self.wrong) and self._clock() >= self._next

    def read(self) -> dict[str, dict[str, Any]]:
        """Return its tasks.

        Raises:
            OSError, ValueError: it cannot be read, or is no index.
        """
        if not self.path.is_file():  # a pipe would let whoever reads it wait for ever
            raise ValueError("it is absent, or no plain file")
        if self.path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        found = json.loads(self.path.read_text(encoding="utf-8"))
        tasks = found.get("tasks") if isinstance(found, dict) else None
        if not isinstance(tasks, dict) or not tasks or not all(isinstance(entry, dict) for entry in tasks.values()):
            raise ValueError("it lists no tasks")
        return tasks

    def done(self, tasks: int, wrong: Sequence[str]) -> None:
        """Note an attempt: how many tasks are served now, and what could not be done."""
        before, self.wrong = self.wrong, list(wrong)
        self._set("vtk_tasks", tasks)
        self._set("vtk_tasks_wrong", len(wrong))
        if wrong:
            self.failures += 1
            self._set("vtk_index_failures", self.failures)
            self._wait = min(max(2 * self._wait, 1.0), LONGEST_S)
            self._next = self._clock() + self._wait
            then = f"{tasks} tasks are served, the next attempt is in {self._wait:.0f} s"
            for line in wrong:
                log(f"{self._name}: {line}; {then}")
        elif before:
            log(f"{self._name}: {self.path} is followed again, {tasks} tasks are served", "info")

    def _set(self, name: str, value: float) -> None:
        if name in self._metrics:
            with contextlib.suppress(Exception):  # of a server that has just switched them off
                self._metrics[name].set(value)


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Return what differs when a file was replaced; None while it is absent."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _metrics(labels: dict[str, str]) -> dict[str, Any]:
    """Return the metrics; none of a server without them."""
    made: dict[str, Any] = {}
    with contextlib.suppress(Exception):
        for name, text in _METRICS.items():
            family = pb_utils.MetricFamily(name=name, description=text, kind=pb_utils.MetricFamily.GAUGE)
            made[name] = family.Metric(labels=labels)
            made[f"{name} family"] = family  # which owns it
    return made
