"""Trial of OpenVINO's CPU plugin in a process of its own: libraries that do not fit the system may end the process."""

import importlib.util
import json
import time
from collections.abc import Iterator

from vtk.commands._doctor_checks import Check
from vtk.commands._doctor_providers import DEADLINE_S, ended, finish, start, why

_TRY = """
import io, json, sys
import numpy as np
import openvino
core = openvino.Core()
model = core.compile_model(core.read_model(io.BytesIO(sys.stdin.buffer.read())), "CPU", {"INFERENCE_NUM_THREADS": 1})
result = model({"x": np.full((2, 2), 3, np.float32)})[0]
able = list(map(str, core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")))
print(json.dumps([openvino.__version__, able, float(result.sum())]), flush=True)
"""
_RIGHT = 36.0  # four times 3²


class Trial:
    """Compiles and runs a model in the background; made early, asked late."""

    def __init__(self) -> None:
        self._end = time.monotonic() + DEADLINE_S
        self._process = start([_TRY]) if importlib.util.find_spec("openvino") is not None else None

    def check(self) -> Iterator[Check]:
        """Report whether OpenVINO computes here and in which precision; nothing where it is not installed."""
        if self._process is None:
            return
        code, out, err = finish(self._process, self._end)
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
        if not lines:
            detail = f"does not load or compute: {why(err) or ended(code)}"
            yield Check("openvino", "OpenVINO", "problem", detail, "pip install --force-reinstall openvino")
            return
        version, able, total = lines[0]
        if total != _RIGHT:
            detail = f"{version} computes {total:g} in place of {_RIGHT:g}"
            yield Check("openvino", "OpenVINO", "problem", detail, "pip install --upgrade openvino")
            return
        bf16 = "BF16" in able
        default = "bf16, as this processor has it" if bf16 else "fp32, as this processor has no bf16"
        yield Check("openvino", "OpenVINO", "ok", f"{version} computes (back-end openvino), by default in {default}")
