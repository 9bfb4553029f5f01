"""Counts requests and images by task, and shows them in the server's metrics; part of a model of many tasks.

Needs the server's own module, and `vtk_rows.py` beside it. A change of a metric is a message to the server's process,
which takes long for a call of many tasks: calls only add to numbers in memory, and a thread hands over once a second
what has changed. A removed task keeps its last numbers, and goes on from them when it comes again.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from vtk_rows import Counts, plain  # type: ignore[import-not-found]

FLUSH_S = 1.0
"""Seconds by which the metrics may be late."""

_BY_TASK = {
    "vtk_task_requests": "Requests with images of the task that were answered.",
    "vtk_task_images": "Images of the task in requests that were answered.",
    "vtk_task_failures": "Requests with images of the task that got an error.",
}
_UNKNOWN = "vtk_unknown_tasks", "Requests that named a task which the model does not have; they got an error."


class Counters:
    """Counts of the tasks of one model instance.

    Attributes:
        totals: by metric and task, since the model was loaded; the task is "" for requests with an unknown one.
    """

    def __init__(self, args: Mapping[str, str]) -> None:
        self.totals: Counter[tuple[str, str]] = Counter()
        self._shown: Counter[tuple[str, str]] = Counter()
        self._turn = threading.Lock()
        keys = {"model": "model_name", "version": "model_version", "instance": "model_instance_name"}
        self._labels = {label: args.get(key, "") for label, key in keys.items()}
        self._families, self._metrics = _families(), dict[tuple[str, str], Any]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="vtk-counters", daemon=True)
        self._thread.start()

    def count(self, counts: Counts) -> None:
        """Add what one call was about."""
        with self._turn:
            for task, images in counts.images.items():
                self.totals["vtk_task_images", task] += images
            for task, requests in counts.answered.items():
                self.totals["vtk_task_requests", task] += requests
            for task, requests in counts.failed.items():
                self.totals["vtk_task_failures", task] += requests
            if counts.unknown:
                self.totals[_UNKNOWN[0], ""] += counts.unknown

    def close(self) -> None:
        """Hand over what is left, and end the thread."""
        self._stop.set()
        self._thread.join(2 * FLUSH_S)
        self.flush()

    def flush(self) -> None:
        """Hand over what has changed since the last time."""
        with self._turn:
            changed = {key: total - self._shown[key] for key, total in self.totals.items() if total > self._shown[key]}
            self._shown.update(changed)
        for key, more in changed.items():
            with contextlib.suppress(Exception):  # of a server that has just switched them off
                if key[0] in self._families:
                    self._metric(*key).increment(more)

    def _metric(self, name: str, task: str) -> Any:
        if (name, task) not in self._metrics:
            labels = self._labels | ({"task": plain(task)} if name in _BY_TASK else {})
            self._metrics[name, task] = self._families[name].Metric(labels=labels)
        return self._metrics[name, task]

    def _watch(self) -> None:
        while not self._stop.wait(FLUSH_S):
            self.flush()


def _families() -> dict[str, Any]:
    """Return the metrics' families; none of a server without them."""
    with contextlib.suppress(Exception):
        return {
            name: pb_utils.MetricFamily(name=name, description=text, kind=pb_utils.MetricFamily.COUNTER)
            for name, text in (*_BY_TASK.items(), _UNKNOWN)
        }
    return {}
