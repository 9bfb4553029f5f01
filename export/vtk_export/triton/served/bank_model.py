"""Triton model of many tasks in a `vtk.serving.TaskBank`; packs come and go while it serves.

Needs this toolkit in the server's Python, and `vtk_rows.py` beside it. ``tasks.json`` names the packs beside it; it is
looked at every second, and what changed is added or removed. A pack is read while the others serve, and a batch sees
the tasks as they were when it began, so nothing waits and nothing fails.
"""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from vtk_rows import Batches, Task, answer, parameters  # type: ignore[import-not-found]

from vtk.errors import VtkError
from vtk.serving import TaskBank

POLL_S = 1.0
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class TritonPythonModel:
    """What the server calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the packs, and start to look for others."""
        here = Path(args["model_repository"], args["model_version"]).absolute()
        told = parameters(json.loads(args["model_config"]))
        cuda = args["model_instance_kind"] == "GPU"
        device = f"cuda:{args['model_instance_device_id']}" if cuda else "cpu"
        if "threads" in told:
            torch.set_num_threads(int(told["threads"]))
        self.softmax = told.get("softmax") == "1"
        self.index = here / "tasks.json"
        self.bank = TaskBank(here / "base.safetensors", device=device, dtype=_DTYPES.get(told.get("dtype", "auto")))
        self.tasks: dict[str, Task] = {}
        self.keys: dict[str, str] = {}  # what a task is called in the bank: another name for every version of its pack
        self.turn = threading.Lock()  # of a batch, or of a change of the two above
        self.seen = _mark(self.index)
        if wrong := self._follow():
            raise pb_utils.TritonModelException("; ".join(wrong))
        self.stop = threading.Event()
        self.watcher = threading.Thread(target=self._watch, name="vtk-tasks", daemon=True)
        self.watcher.start()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests; images of all tasks are one call of the bank."""
        with self.turn:
            return answer(requests, self.tasks, self._run, softmax=self.softmax)

    def finalize(self) -> None:
        """Stop looking, and drop the bank."""
        self.stop.set()
        self.watcher.join(2 * POLL_S)
        del self.bank

    def _run(self, batches: Batches) -> dict[str, np.ndarray]:
        images = {self.keys[name]: torch.from_numpy(pixels) for name, pixels in batches.items()}
        logits = self.bank(images)
        return {name: logits[self.keys[name]].float().cpu().numpy() for name in batches}

    def _watch(self) -> None:
        while not self.stop.wait(POLL_S):
            mark = _mark(self.index)
            if mark is None or mark == self.seen:
                continue
            wrong = self._follow()
            for line in wrong:
                pb_utils.Logger.log_error(line)
            # a pack that could not be read is tried again: its folder may have been replaced a moment later
            self.seen = None if wrong else mark

    def _follow(self) -> list[str]:
        """Make the bank what the index says; return what could not be done."""
        try:
            wanted = json.loads(self.index.read_text(encoding="utf-8"))["tasks"]
        except (OSError, ValueError, KeyError) as error:
            return [f"{self.index} cannot be read ({error})"]
        wrong = []
        for name in [name for name in self.keys if name not in wanted]:
            self._change(name, None, None)
        for name, entry in wanted.items():
            key = f"{name} {entry['digest']}"
            if self.keys.get(name) == key:
                continue
            try:
                self.bank.add(key, self.index.parent / entry["pack"])
            except (VtkError, OSError) as error:
                wrong.append(f"task {name!r}: {error}")
                continue
            info = self.bank.tasks[key]
            self._change(name, key, Task(tuple(info.classes), (info.in_chans, info.height, info.width)))
        return wrong

    def _change(self, name: str, key: str | None, task: Task | None) -> None:
        """Between two batches, let a name mean another pack, or nothing."""
        with self.turn:
            old = self.keys.pop(name, None)
            self.tasks.pop(name, None)
            if key is not None and task is not None:
                self.keys[name], self.tasks[name] = key, task
            if old is not None:
                self.bank.remove(old)


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Return what differs when a file was replaced; None while it is absent."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
