"""Triton model that runs classifiers with OpenVINO on the CPU: a compiled model for each task.

Needs numpy, openvino, and `vtk_rows.py` and `vtk_counters.py` beside it. ``tasks.json`` says which file is whose. All
of OpenVINO's settings are given, so that they do not depend on the computer; products are rounded to bf16 where the
config says so and the processor has it, and the server's log says which it is.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from vtk_counters import Counters  # type: ignore[import-not-found]
from vtk_rows import Batches, Task, answer, log, names_in, parameters  # type: ignore[import-not-found]

_CPU = "CPU"


class TritonPythonModel:
    """What the server calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Check and compile each task's files."""
        here = Path(args["model_repository"], args["model_version"]).absolute()
        index = json.loads((here / "tasks.json").read_text(encoding="utf-8"))
        config = json.loads(args["model_config"])
        told = parameters(config)
        self.softmax, self.names = told.get("softmax") == "1", names_in(told)
        for name, exported in index["sha256"].items():
            if _sha256(here / name) != exported:
                raise pb_utils.TritonModelException(f"{here / name} is damaged: it is not the file that was exported")
        core = openvino.Core()
        threads = int(told.get("threads", 0)) or _share_of_cores(config)
        precision = _precision(core, told.get("precision", "fp32"))
        settings = {
            "INFERENCE_PRECISION_HINT": {"fp32": "f32"}.get(precision, precision), "EXECUTION_MODE_HINT": "PERFORMANCE",
            "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": threads,
            # instances are processes, which would pin their threads to the same cores
            "ENABLE_CPU_PINNING": False, "ENABLE_HYPER_THREADING": True, "SCHEDULING_CORE_TYPE": "ANY_CORE",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        }  # fmt: skip
        self.requests = {
            name: core.compile_model(str(here / entry["file"]), _CPU, settings).create_infer_request()
            for name, entry in index["tasks"].items()
        }
        self.tasks = {
            name: Task(
                tuple(entry["classes"]),
                (entry["in_chans"], entry["height"], entry["width"]),
                entry.get("temperature", 1.0),
            )
            for name, entry in index["tasks"].items()
        }
        log(
            f"{args['model_name']}: OpenVINO {openvino.__version__}, products in {precision}, {threads} threads", "info"
        )
        self.counters = Counters(args)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests; the images of each task are one batch."""
        return answer(
            requests, self.tasks, self._run, softmax=self.softmax, count=self.counters.count, names=self.names
        )

    def finalize(self) -> None:
        """Drop the compiled models and their memory."""
        self.counters.close()
        self.requests.clear()

    def _run(self, batches: Batches) -> dict[str, np.ndarray]:
        # outputs are copied: a request writes those of the next call into the same memory
        return {
            name: self.requests[name].infer({0: pixels}, share_inputs=True, share_outputs=False)[0]
            for name, pixels in batches.items()
        }


def _share_of_cores(config: Mapping[str, Any]) -> int:
    """Return the cores that this process may use, divided among the instances."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = sum(int(group.get("count", 1)) for group in config.get("instance_group", [])) or 1
    return max(1, cores // count)


def _precision(core: Any, wanted: str) -> str:
    """Return the precision of products; OpenVINO would replace one that the processor lacks without a word."""
    if wanted == "bf16" and "BF16" not in core.get_property(_CPU, "OPTIMIZATION_CAPABILITIES"):
        log("this processor has no bf16 (AVX512_BF16 or AMX): products are fp32, which is exacter and slower", "warn")
        return "fp32"
    return wanted


def _sha256(path: Path) -> str:
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            hasher.update(chunk)
    return hasher.hexdigest()
