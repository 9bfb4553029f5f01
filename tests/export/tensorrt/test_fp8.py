"""The linter on e4m3: graphs made by hand, each with one fault, which is named with its node and what to do."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.export.tensorrt._graphs import make_graph
from vtk_export.lint.finding import REFUSED, SLOW
from vtk_export.lint.linter import lint
from vtk_export.tensorrt.config import parse_version

NEW = parse_version("10.x")


def graph(**changes: Any) -> onnx.ModelProto:
    """Return a product of tokens (batch, 4, 16) with a weight (16, 32), both from e4m3, but for some changes."""
    half = np.float16
    parts: dict[str, Any] = {
        "token_scale": np.array(0.25, half), "weight_scale": np.full(32, 0.5, half), "axis": 1, "second": "token_scale",
        "tokens": "read", "weight": "w_read", "more": [], "weights": {}, **changes,
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "token_scale", "zero"], ["q"], name="round"),
        helper.make_node("DequantizeLinear", ["q", parts["second"], "zero"], ["read"], name="read_tokens"),
        helper.make_node("DequantizeLinear", ["w", "weight_scale", "zeros"], ["w_read"], name="read_weight",
                         axis=parts["axis"]),
        helper.make_node("MatMul", [parts["tokens"], parts["weight"]], ["y"], name="product"),
        *parts["more"],
    ]  # fmt: skip
    weights = {
        "token_scale": parts["token_scale"], "weight_scale": parts["weight_scale"],
        "zero": np.zeros(parts["token_scale"].shape, ml_dtypes.float8_e4m3fn),
        "zeros": np.zeros(len(parts["weight_scale"]), ml_dtypes.float8_e4m3fn),
        "w": np.ones((16, 32), ml_dtypes.float8_e4m3fn), **parts["weights"],
    }  # fmt: skip
    return make_graph(nodes, inputs={"x": (TensorProto.FLOAT16, ["batch", 4, 16])}, weights=weights, opset=19)


def node(op: str, inputs: list[str], output: str) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], name="other")


FAULTS: dict[str, tuple[dict[str, Any], str, str, str, str]] = {
    "tokens with a scale each": ({"token_scale": np.full(16, 0.25, np.float16)},
                                 "round", "has 16 scales", "one scale", REFUSED),
    "another scale": ({"second": "s2", "weights": {"s2": np.array(0.5, np.float16)}},
                      "read_tokens", "another scale than the QuantizeLinear", "give both one", REFUSED),
    "summed axis": ({"axis": 0, "weight_scale": np.full(16, 0.5, np.float16)},
                    "read_weight", "along axis 0, which the product sums over", "along axis 1", REFUSED),
    "no scale": ({"weight_scale": np.zeros(32, np.float16)},
                 "read_weight", "not positive", "any positive one", REFUSED),
    "read as it is": ({"more": [node("Transpose", ["q"], "t"), node("DequantizeLinear", ["t", "token_scale"], "z")]},
                      "round", "is read by Transpose as e4m3", "DequantizeLinear alone", REFUSED),
    "half a product": ({"tokens": "x"}, "product", "reads e4m3 but for its tokens", "round its tokens", SLOW),
    "half a product more": ({"weight": "v", "weights": {"v": np.ones((16, 32), np.float16)}},
                            "product", "but for its weight, and so multiplies in FLOAT16", "round its weight", SLOW),
    "rounded for nothing": ({"tokens": "x", "weight": "w_read", "more": [node("Relu", ["read"], "r")]},
                            "read_tokens", "is read by no product", "leave the pair out", SLOW),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_node_and_what_to_do(name: str) -> None:
    changes, where, problem, remedy, level = FAULTS[name]
    found = [f for f in lint(graph(**changes), NEW) if f.node == where]
    assert [f for f in found if problem in f.problem and remedy in f.remedy and f.level == level], found


def test_a_computed_scale_is_refused() -> None:
    proto = graph()
    proto.graph.node.insert(0, node("ReduceMax", ["x"], "s"))
    proto.graph.node[1].input[1] = proto.graph.node[2].input[1] = "s"
    assert any("computed in the graph" in f.problem and f.level == REFUSED for f in lint(proto, NEW))


def test_a_graph_as_it_is_written_has_no_fault() -> None:
    assert lint(graph(), NEW) == []
    assert lint(graph(token_scale=np.full(1, 0.25, np.float16)), NEW) == []  # one scale in a vector
    assert any("DequantizeLinear" in f.op for f in lint(graph(), parse_version("8.6")))
