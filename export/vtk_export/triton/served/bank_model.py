"""Triton model of many tasks in a `vtk.bank.TaskBank`; packs come and go while it serves.

Needs this toolkit in the server's Python, and `vtk_rows.py` and `vtk_index.py` beside it. ``tasks.json`` names the
packs beside it; it is looked at every second, and what changed is added or removed. A pack is read while the others
serve, and a batch sees the tasks as they were when it began, so nothing waits and nothing fails. What cannot be read
is said and tried again (`vtk_index`), and what is served stays.
"""

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from vtk_index import Index  # type: ignore[import-not-found]
from vtk_rows import Batches, Task, answer, log, parameters, why  # type: ignore[import-not-found]

from vtk.bank import TaskBank

POLL_S = 1.0
_PARTS = ("task.json", "task.safetensors", "base_tensors.json")
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
        self.bank = TaskBank(here / "base.safetensors", device=device, dtype=_DTYPES.get(told.get("dtype", "auto")))
        if (graphs := getattr(self.bank, "graphs", None)) is not None:
            graphs.notice = lambda what, nbytes: log(f"{what}: {nbytes:,} bytes on the device", "info")
        self.tasks: dict[str, Task] = {}
        self.keys: dict[str, str] = {}  # what a task is called in the bank: another name for every version of its pack
        self.turn = threading.Lock()  # of a batch, or of a change of the two above
        self.index = Index(here / "tasks.json", args)
        self.index.due()
        if wrong := self._follow():  # a server that loads it beside an earlier one goes on with that
            raise pb_utils.TritonModelException("; ".join(wrong))
        self.stop = threading.Event()
        self._start()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests; images of all tasks are one call of the bank."""
        if not self.watcher.is_alive():
            log(f"nobody looked at {self.index.path} any more; that starts again")
            self._start()
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

    def _start(self) -> None:
        self.watcher = threading.Thread(target=self._watch, name="vtk-tasks", daemon=True)
        self.watcher.start()

    def _watch(self) -> None:
        while not self.stop.wait(POLL_S):
            try:
                if self.index.due():
                    self._follow()
            except BaseException as error:  # whatever it was, the thread is not to end without a word
                wrong = f"{self.index.path} cannot be followed ({type(error).__name__}: {why(error)})"
                self.index.done(len(self.tasks), [wrong])

    def _follow(self) -> list[str]:
        """Make the bank what the index says; return what could not be done."""
        wrong = []
        try:
            wanted = self.index.read()
        except Exception as error:
            wrong.append(f"{self.index.path} cannot be read ({why(error)})")
            wanted = None
        if wanted is not None:
            for name in [name for name in self.keys if name not in wanted]:
                self._change(name, None, None)
            for name, entry in wanted.items():
                try:
                    self._take(name, entry)
                except Exception as error:  # a damaged pack, no memory: the other tasks are not to suffer from it
                    wrong.append(f"task {name!r}: {why(error)}")
        self.index.done(len(self.tasks), wrong)
        return wrong

    def _take(self, name: str, entry: Mapping[str, str]) -> None:
        """Serve a task as an entry of the index says, if it is not served so."""
        if missing := [key for key in ("digest", "pack") if not isinstance(entry.get(key), str)]:
            raise ValueError(f"its entry has no `{missing[0]}`")
        key = f"{name} {entry['digest']}"
        if self.keys.get(name) == key:
            return
        if key not in self.bank.tasks:  # else the last attempt ended after that
            pack = self.index.path.parent / entry["pack"]
            # zeroed or half copied weights are read without complaint; an index by hand may have any text as digest
            if re.fullmatch("[0-9a-f]{16}", entry["digest"]) and entry["digest"] != _digest(pack):
                raise ValueError(f"{pack} is damaged, or not copied yet: its bytes are not those of its digest")
            self.bank.add(key, pack)
        info = self.bank.tasks[key]
        self._change(name, key, Task(tuple(info.classes), (info.in_chans, info.height, info.width)))

    def _change(self, name: str, key: str | None, task: Task | None) -> None:
        """Between two batches, let a name mean another pack, or nothing."""
        with self.turn:
            old = self.keys.pop(name, None)
            self.tasks.pop(name, None)
            if key is not None and task is not None:
                self.keys[name], self.tasks[name] = key, task
            if old is not None:
                self.bank.remove(old)


def _digest(pack: Path) -> str:
    """Return the digest of a pack's files, as the export writes it into the index."""
    found = hashlib.sha256()
    for part in _PARTS:
        if not (pack / part).is_file():
            raise ValueError(f"{pack / part} is absent, or no plain file")
        found.update(json.dumps([part, (pack / part).stat().st_size]).encode())
        with (pack / part).open("rb") as file:
            while chunk := file.read(1 << 24):
                found.update(chunk)
    return found.hexdigest()[:16]
