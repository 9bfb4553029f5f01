"""Triton model of many tasks in one ONNX model that takes their low-rank factors; tasks come and go while it serves.

Needs numpy, onnxruntime, and `vtk_rows.py`, `vtk_index.py`, `vtk_watch.py`, `vtk_counters.py` and `vtk_factors.py`
beside it. ``factors.json`` describes the graph; ``tasks.json`` names the file of each task's factors, and what changed
there is added or removed (`vtk_watch`). The base's weights are in memory once.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from vtk_counters import Counters  # type: ignore[import-not-found]
from vtk_factors import FactorModel  # type: ignore[import-not-found]
from vtk_rows import Batches, Task, answer, names_in, parameters  # type: ignore[import-not-found]
from vtk_watch import Watch  # type: ignore[import-not-found]


class TritonPythonModel:
    """What the server calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the graph, read the tasks' files, and start to look for others."""
        here = Path(args["model_repository"], args["model_version"]).absolute()
        told = parameters(json.loads(args["model_config"]))
        threads = int(told["threads"]) if "threads" in told else None
        self.softmax, self.names = told.get("softmax") == "1", names_in(told)
        self.model = FactorModel(here, threads=threads, tasks=())
        self.watch = Watch(here / "tasks.json", args, "file", (), self._add, self.model.remove)
        self.watch.begin()
        self.counters = Counters(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests; images of all tasks are one run of the graph."""
        self.watch.check()
        with self.watch.turn:
            return answer(
                requests, self.watch.tasks, self._run, softmax=self.softmax, count=self.counters.count, names=self.names
            )

    def finalize(self) -> None:
        """Stop looking, and drop the graph."""
        self.watch.end()
        self.counters.close()
        del self.model

    def _run(self, batches: Batches) -> dict[str, np.ndarray]:
        keys = self.watch.keys
        logits = self.model.run({keys[name]: pixels for name, pixels in batches.items()})
        return {name: logits[keys[name]] for name in batches}

    def _add(self, key: str, file: Path, entry: Mapping[str, Any]) -> Task:
        if key not in self.model.tasks:  # else the last attempt ended after that
            self.model.add(key, file)
        task = self.model.tasks[key]
        return Task(task.classes, task.shape, float(entry.get("temperature", 1.0)))
