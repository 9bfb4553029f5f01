"""``vtk profile --server`` against the real server: a right model, and one that is wrong when requests are joined."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vtk.profiling.server.config import ServerConfig
from vtk.profiling.server.drive import profile_server

pytestmark = pytest.mark.server

CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 16
input [{{ name: "pixel_values", data_type: TYPE_FP32, dims: [3, 8, 8] }}]
output [{{ name: "logits", data_type: TYPE_FP32, dims: [5] }}]
dynamic_batching {{ max_queue_delay_microseconds: 5000 }}
"""

MODEL = """
import numpy as np
import triton_python_backend_utils as pb

WEIGHT = np.random.default_rng(0).normal(size=(192, 5)).astype(np.float32)


class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            images = pb.get_input_tensor_by_name(request, "pixel_values").as_numpy()
            found.append(images.reshape(len(images), -1) @ WEIGHT)
        if {swaps}:
            found = found[1:] + found[:1]
        return [pb.InferenceResponse([pb.Tensor("logits", rows)]) for rows in found]
"""


@pytest.fixture(scope="module")
def server(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    root: Path = tmp_path_factory.mktemp("profiled")
    for name in ("right", "swaps"):
        (root / "models" / name / "1").mkdir(parents=True)
        (root / "models" / name / "config.pbtxt").write_text(CONFIG.format(name=name))
        (root / "models" / name / "1" / "model.py").write_text(MODEL.format(swaps=name == "swaps"))
    running = tools.Server(root / "models", root, polls=False)
    try:
        for name in ("right", "swaps"):
            running.wait(name)
        yield running
    finally:
        running.stop()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_server_that_swaps_joined_requests_is_found_out(server: Any, protocol: str) -> None:
    options: dict[str, Any] = {"protocol": protocol, "concurrency": (1, 8), "duration": 2.0, "stability": 500.0}
    right = profile_server(ServerConfig(server=server.url[protocol], model="right", **options), show_progress=False)
    assert right.exit_code == 0 and [level.status for level in right.levels] == ["ok", "ok"]
    assert right.levels[1].server_batch > 1.5  # they were joined
    assert all(level.checked > 100 and not level.wrong for level in right.levels)
    wrong = profile_server(ServerConfig(server=server.url[protocol], model="swaps", **options), show_progress=False)
    alone, busy = wrong.levels
    assert alone.status == "ok" and busy.status == "mismatch" and wrong.exit_code == 4
    assert busy.wrong > 0.5 * busy.checked and "the answer to the image of another request" in busy.reason
