"""Counted memory against sums by hand, and against what ONNX Runtime and torch are asked to hold."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from vtk.profiling.memory_count import count_memory, live_peak
from vtk.profiling.onnx_memory import memory_of_onnx


def test_live_peak_is_the_sum_of_what_is_alive_at_once() -> None:
    x = torch.randn(8, 100)
    first, last = nn.Linear(100, 1000, bias=False), nn.Linear(1000, 10, bias=False)

    def call() -> torch.Tensor:
        with torch.inference_mode():
            hidden = first(x)
            hidden = hidden.relu()  # here both are alive
            return last(hidden)

    assert live_peak(call) == 2 * 8 * 1000 * 4
    assert live_peak(call) == live_peak(call)


@pytest.mark.parametrize("batch", [1, 7])
def test_weights_count_once_and_images_with_the_activations(fakes, batch: int) -> None:
    backend = fakes.Backend("eager")
    backend.model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
    backend.model.tied = backend.model[1].weight
    images = torch.randn(batch, 3, 8, 8)
    found = count_memory(backend, lambda: backend.run({"pixel_values": images}), {"pixel_values": images})
    assert found.weights == 4 * (192 * 5 + 5)
    assert found.activations == batch * 4 * (192 + 5)


def model_file(path: Path, batch: object = "batch") -> Path:
    """Two products with a residual: at its most three values of (B, 64) are alive."""
    weight = numpy_helper.from_array(np.ones((64, 64), np.float32), "w")
    nodes = [
        helper.make_node("Reshape", ["pixel_values", "shape"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("MatMul", ["c", "w"], ["logits"]),
    ]
    shape = numpy_helper.from_array(np.array([-1, 64], np.int64), "shape")
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, [batch, 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, 64])], [weight, shape],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


@pytest.mark.parametrize("batch", [1, 32])
def test_an_onnx_graph_is_walked_at_its_batch(tmp_path: Path, batch: int) -> None:
    found = memory_of_onnx(model_file(tmp_path / "m.onnx"), {"pixel_values": (batch, 1, 8, 8)})
    # the reshape is the caller's memory, as the images are; a, b and c are alive together
    assert found == (64 * 64 * 4 + 2 * 8, 3 * batch * 64 * 4)


def test_an_operator_of_another_domain_leaves_it_unknown(tmp_path: Path) -> None:
    proto = onnx.load(model_file(tmp_path / "m.onnx"))
    proto.graph.node[2].domain, proto.graph.node[2].op_type = "com.example", "Gelu9"
    onnx.save(proto, tmp_path / "m.onnx")
    # the weights are known all the same
    assert memory_of_onnx(tmp_path / "m.onnx", {"pixel_values": (2, 1, 8, 8)}) == (64 * 64 * 4 + 2 * 8, None)


# in a process of its own: nothing of the count may reach standard output or standard error
QUIET = """
import torch
from vtk.profiling.memory_count import live_peak
print(live_peak(lambda: torch.ones(1000)))
"""


@pytest.mark.slow
def test_counting_is_silent() -> None:
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "4000" and "profiler" not in done.stderr
