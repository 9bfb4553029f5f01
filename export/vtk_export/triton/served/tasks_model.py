"""Triton model of many tasks on ONNX Runtime: one session for each task, their common weights in memory once.

Needs numpy, onnxruntime, and `vtk_rows.py`, `vtk_counters.py` and `vtk_prepack.py` beside it. ``tasks.json`` says
which file is whose. Weights are packed for this computer when a model is loaded for the first time (`vtk_prepack`).
Where that cannot be, sessions use the weights as they are, mapped from the one data file that the tasks' files refer
to: slower, as small.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from vtk_counters import Counters  # type: ignore[import-not-found]
from vtk_prepack import digests, prepare  # type: ignore[import-not-found]
from vtk_rows import Batches, Task, answer, names_in, parameters  # type: ignore[import-not-found]


class TritonPythonModel:
    """What the server calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open a session for each task."""
        here = Path(args["model_repository"], args["model_version"]).absolute()
        index = json.loads((here / "tasks.json").read_text(encoding="utf-8"))
        told = parameters(json.loads(args["model_config"]))
        threads, self.softmax = told.get("threads"), told.get("softmax") == "1"
        self.names = names_in(told)
        _make_arena()
        files = {name: here / entry["file"] for name, entry in index["tasks"].items()}
        known = digests(files)
        for name, exported in index.get("sha256", {}).items():
            if known.get(name) != exported:
                raise ValueError(f"{here / name} is damaged or absent: it is not the file that was exported")
        try:
            packed = prepare(files, known=known)
            self.sessions = {name: _open(path, {}, threads) for name, path in packed.items()}
        except Exception as error:  # a full disk, a home that is not there, damaged files: no reason not to serve
            pb_utils.Logger.log_warn(f"the weights are not packed, which makes {args['model_name']} slower: {error}")
            self.sessions = {name: _open(path, index["session_options"], threads) for name, path in files.items()}
        self.tasks = {
            name: Task(
                tuple(entry["classes"]),
                (entry["in_chans"], entry["height"], entry["width"]),
                entry.get("temperature", 1.0),
            )
            for name, entry in index["tasks"].items()
        }
        self.counters = Counters(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests; the images of each task are one batch."""
        return answer(
            requests, self.tasks, self._run, softmax=self.softmax, count=self.counters.count, names=self.names
        )

    def finalize(self) -> None:
        """Drop the sessions and their memory."""
        self.counters.close()
        self.sessions.clear()

    def _run(self, batches: Batches) -> dict[str, np.ndarray]:
        return {
            name: self.sessions[name].run(["logits"], {"pixel_values": pixels})[0] for name, pixels in batches.items()
        }


def _make_arena() -> None:
    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    with contextlib.suppress(Exception):  # there is one already
        ort.create_and_register_allocator(place, ort.OrtArenaCfg(0, -1, -1, -1))


def _open(path: Path, entries: Mapping[str, str], threads: str | None) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = int(threads)
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    # sessions run one after the other, so they take memory for activations from one arena and leave it to the next
    options.add_session_config_entry("session.use_env_allocators", "1")
    # every session has threads of its own; those of the others are not to burn the cores in wait for work
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
