"""GELU and biases in the order that onnxruntime fuses: the same numbers, fewer passes."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from vtk.card import InputSpec
from vtk.runtime.backends.ort_quantize import quantize_dynamic
from vtk_export.graph.convert import convert
from vtk_export.graph.rewrite import complete_norms, reorder_bias, reorder_gelu


def gelu(
    *, half: float = 0.5, one: float = 1.0, root: float = 2**0.5, inner: str = "x", tap: bool = False
) -> onnx.ModelProto:
    """Return x · (½ · (1 + erf(x/√2))) as torch's exporter writes it, with one thing changed."""
    nodes = [
        helper.make_node("Neg", ["x"], ["y"]),
        helper.make_node("Div", [inner, "root"], ["scaled"]),
        helper.make_node("Erf", ["scaled"], ["erf"]),
        helper.make_node("Add", ["erf", "one"], ["sum"]),
        helper.make_node("Mul", ["half", "sum"], ["gate"]),
        helper.make_node("Mul", ["x", "gate"], ["z"]),
    ]
    values = {"half": half, "one": one, "root": root}
    weights = [numpy_helper.from_array(np.array(v, np.float32), name) for name, v in values.items()]
    info = {n: helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in ("x", "z", "gate")}
    outputs = [info["z"], info["gate"]] if tap else [info["z"]]
    graph = helper.make_graph(nodes, "g", [info["x"]], outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(["z"], {"x": x})[0]


def optimized(path: Path, target: Path) -> Counter[str]:
    """Return the operators that onnxruntime runs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(target)
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(target).graph.node)


def test_numbers_do_not_change_and_onnxruntime_fuses(tmp_path: Path) -> None:
    x = np.linspace(-6, 6, 1001, dtype=np.float32)
    before, after = gelu(), gelu()
    assert reorder_gelu(after.graph) == 1
    onnx.checker.check_model(after, full_check=True)
    np.testing.assert_array_equal(run(after, x), run(before, x))
    for model, fused in ((before, 0), (after, 1)):
        onnx.save(model, tmp_path / "x.onnx")
        assert optimized(tmp_path / "x.onnx", tmp_path / "y.onnx")["Gelu"] == fused
    assert reorder_gelu(after.graph) == 0


@pytest.mark.parametrize(
    "model",
    [gelu(half=0.25), gelu(one=2.0), gelu(root=1.5), gelu(inner="y"), gelu(tap=True)],
    ids=["other-half", "other-sum", "other-root", "other-input", "read-elsewhere"],
)
def test_what_is_no_gelu_is_left_alone(model: onnx.ModelProto) -> None:
    before = model.SerializeToString()
    assert reorder_gelu(model.graph) == 0
    assert model.SerializeToString() == before


def test_exported_linear_and_gelu_become_one_node(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.GELU(), nn.Linear(8, 2))
    proto = convert(model, InputSpec(4, 4), opset=18)
    onnx.save(proto, tmp_path / "x.onnx")
    kinds = optimized(tmp_path / "x.onnx", tmp_path / "y.onnx")
    assert kinds["Erf"] == 0
    assert kinds["Gelu"] + kinds["BiasGelu"] == 1


def residual(*, bias_axes: int = 1, tap: str = "", constant: bool = True, swapped: bool = False) -> onnx.ModelProto:
    """Return (x + b) + (x·V)·W as a fused block is exported, with one thing changed."""
    rng = np.random.default_rng(0)
    values = {"w": rng.normal(size=(16, 16)), "v": rng.normal(size=(16, 16)), "b": rng.normal(size=16)}
    values["b"] = values["b"].reshape((1,) * (bias_axes - 1) + (16,))
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["p"]),
        helper.make_node("Add", ["b", "x"] if swapped else ["x", "b"], ["shifted"]),
        helper.make_node("MatMul", ["p", "w" if constant else "other"], ["product"]),
        helper.make_node("Add", ["product", "shifted"] if swapped else ["shifted", "product"], ["z"]),
    ]
    weights = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()]
    info = {
        n: helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 5, 16]) for n in ("x", "z", "shifted", "product")
    }
    inputs = [info["x"]]
    if not constant:
        inputs.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, [16, 16]))
    graph = helper.make_graph(nodes, "g", inputs, [info[n] for n in ("z", tap) if n], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("swapped", [False, True], ids=["x+b", "b+x"])
def test_a_bias_comes_beside_its_product_and_is_fused_into_an_int8_one(tmp_path: Path, swapped: bool) -> None:
    x = np.random.default_rng(1).normal(size=(2, 5, 16)).astype(np.float32)
    before, after = residual(swapped=swapped), residual(swapped=swapped)
    assert reorder_bias(after.graph) == 1
    onnx.checker.check_model(after, full_check=True)  # the order of nodes too
    np.testing.assert_allclose(run(after, x), run(before, x), atol=1e-5)
    for model, sums in ((before, 2), (after, 1)):
        onnx.save(model, tmp_path / "x.onnx")
        quantize_dynamic(tmp_path / "x.onnx", tmp_path / "q.onnx")
        kinds = optimized(tmp_path / "q.onnx", tmp_path / "y.onnx")
        assert (kinds["DynamicQuantizeMatMul"], kinds["Add"]) == (2, sums)
    assert reorder_bias(after.graph) == 0


@pytest.mark.parametrize(
    "model",
    [residual(bias_axes=2), residual(tap="shifted"), residual(tap="product"), residual(constant=False)],
    ids=["no-bias", "sum-read-elsewhere", "product-read-elsewhere", "no-weights"],
)
def test_other_sums_are_left_alone(model: onnx.ModelProto) -> None:
    before = model.SerializeToString()
    assert reorder_bias(model.graph) == 0
    assert model.SerializeToString() == before


def test_every_norm_has_a_bias() -> None:
    class Norms(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.nn.functional.layer_norm(x, (32,))
            y = torch.nn.functional.layer_norm(y, (32,), torch.ones(32), torch.full((32,), 0.5))
            return torch.nn.functional.layer_norm(y[..., :8], (8,), eps=1e-3)

    proto = convert(Norms(), InputSpec(32, 32), opset=18)
    norms = [node for node in proto.graph.node if node.op_type == "LayerNormalization"]
    assert [len(node.input) for node in norms] == [3, 3, 3]
    values = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    assert [float(values[node.input[2]].sum()) for node in norms] == [0, 16, 0]
    assert [len(values[node.input[2]]) for node in norms] == [32, 32, 8]
    assert complete_norms(proto.graph) == 0
    onnx.checker.check_model(proto, full_check=True)
    x = torch.randn(2, 3, 32, 32)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    got = session.run(None, {"pixel_values": x.numpy()})[0]
    np.testing.assert_allclose(got, Norms()(x).numpy(), atol=1e-5)
