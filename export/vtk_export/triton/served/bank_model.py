"""Triton model of many tasks in a `vtk.bank.TaskBank`; packs come and go while it serves.

Needs this toolkit in the server's Python, and `vtk_rows.py`, `vtk_index.py`, `vtk_watch.py` and `vtk_counters.py`
beside it. ``tasks.json`` names the packs beside it; what changed there is added or removed (`vtk_watch`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vtk_counters import Counters  # type: ignore[import-not-found]
from vtk_rows import Batches, Task, answer, log, names_in, parameters  # type: ignore[import-not-found]
from vtk_watch import Watch  # type: ignore[import-not-found]

from vtk.bank import TaskBank
from vtk.packs.cards import read_card

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
        self.softmax, self.names = told.get("softmax") == "1", names_in(told)
        self.bank = TaskBank(here / "base.safetensors", device=device, dtype=_DTYPES.get(told.get("dtype", "auto")))
        if (graphs := getattr(self.bank, "graphs", None)) is not None:
            graphs.notice = lambda what, nbytes: log(f"{what}: {nbytes:,} bytes on the device", "info")
        self.watch = Watch(here / "tasks.json", args, "pack", _PARTS, self._add, self.bank.remove)
        self.watch.begin()
        self.counters = Counters(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests; images of all tasks are one call of the bank."""
        self.watch.check()
        with self.watch.turn:
            return answer(
                requests, self.watch.tasks, self._run, softmax=self.softmax, count=self.counters.count, names=self.names
            )

    def finalize(self) -> None:
        """Stop looking, and drop the bank."""
        self.watch.end()
        self.counters.close()
        del self.bank

    def _run(self, batches: Batches) -> dict[str, np.ndarray]:
        keys = self.watch.keys
        images = {keys[name]: torch.from_numpy(pixels) for name, pixels in batches.items()}
        logits = self.bank(images)
        return {name: logits[keys[name]].float().cpu().numpy() for name in batches}

    def _add(self, key: str, pack: Path, entry: Mapping[str, Any]) -> Task:
        if key not in self.bank.tasks:  # else the last attempt ended after that
            self.bank.add(key, pack)
        info = self.bank.tasks[key]
        return Task(tuple(info.classes), (info.in_chans, info.height, info.width), read_card(pack).temperature)
