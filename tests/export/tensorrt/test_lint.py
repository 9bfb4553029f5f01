"""Graphs made by hand, each refused for one thing, which is named with the node, its type and what to do."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.export.tensorrt._graphs import IMAGE, make_graph
from vtk.errors import DataError, UsageError, VerificationError
from vtk_export.graph.opset17 import lower
from vtk_export.lint.linter import check, lint, load
from vtk_export.lint.operators import operators
from vtk_export.tensorrt.config import OLD, parse_version

NEW = parse_version("10.x")
X = {"x": (TensorProto.FLOAT, ["batch", 4, 16])}


def node(op: str, inputs: list[str], outputs: list[str] | None = None, **more: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs or ["y"], name="the_node", **more)


def of(kind: int) -> dict[str, Any]:
    return {"x": (kind, ["batch", 4, 16])}


def _branches() -> onnx.ModelProto:
    then = helper.make_graph([node("Unique", ["x"], ["t"])], "then", [], [onnx.ValueInfoProto(name="t")])
    other = helper.make_graph([helper.make_node("Identity", ["x"], ["e"])], "else", [], [onnx.ValueInfoProto(name="e")])
    choose = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    return make_graph([choose], inputs={**X, "c": (TensorProto.BOOL, [])})


BAD: dict[str, tuple[onnx.ModelProto, str, str, str, str]] = {
    "operator": (make_graph([node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])], inputs=X),
                 "DynamicQuantizeLinear", "FLOAT", "is not supported by its parser", "ranges that are fixed"),
    "newer operator": (make_graph([node("Gelu", ["x"])], inputs=X, opset=20),
                       "Gelu", "FLOAT", "came with TensorRT 10.15", "with Erf"),
    "domain": (make_graph([node("BiasGelu", ["x", "x"], domain="com.microsoft")], inputs=X, more={"com.microsoft": 1}),
               "BiasGelu", "FLOAT", "com.microsoft", "standard operators"),
    "double": (make_graph([node("Erf", ["x"])], inputs=of(TensorProto.DOUBLE)),
               "Erf", "DOUBLE", "does not support DOUBLE", "cast"),
    "integer product": (make_graph([node("MatMul", ["x", "w"])], inputs=of(TensorProto.INT32),
                                   weights={"w": np.ones((16, 2), np.int32)}),
                        "MatMul", "INT32", "only FLOAT, FLOAT16, BFLOAT16", "cast"),
    "cast": (make_graph([node("Cast", ["x"], to=TensorProto.DOUBLE)], inputs=X),
             "Cast", "DOUBLE", "does not support DOUBLE", "cast"),
    "slice": (make_graph([helper.make_node("Shape", ["x"], ["n"], start=0, end=1), node("Slice", ["x", "n", "e"])],
                         inputs=X, weights={"e": np.array([9])}),
              "Slice", "FLOAT", "`starts` computed", "constants"),
    "reshape": (make_graph([helper.make_node("Shape", ["x"], ["n"], start=0, end=1),
                            helper.make_node("Concat", ["n", "e"], ["s"], axis=0), node("Reshape", ["x", "s"])],
                           inputs=X, weights={"e": np.array([64])}),
                "Reshape", "FLOAT", "`shape` computed", "fixed batch size"),
    "axes": (make_graph([node("ReduceMax", ["x", "a"])], inputs={**X, "a": (TensorProto.INT64, [1])}),
             "ReduceMax", "FLOAT", "`axes` computed", "constants"),
    "zero point": (make_graph([node("QuantizeLinear", ["x", "s", "z"])], inputs=X,
                              weights={"s": np.array(1, np.float32), "z": np.array(3, np.int8)}),
                   "QuantizeLinear", "FLOAT", "non-zero zero point", "symmetrically"),
    "unsigned": (make_graph([node("DequantizeLinear", ["x", "s"])], inputs=of(TensorProto.UINT8),
                            weights={"s": np.array(1, np.float32)}),
                 "DequantizeLinear", "UINT8", "does not support UINT8", "cast"),
    "norm in parts": (make_graph([helper.make_node("ReduceMean", ["x", "a"], ["m"]), node("Sub", ["x", "m"])], inputs=X,
                                 weights={"a": np.array([-1])}),
                      "Sub", "FLOAT", "a norm written in single operators", "LayerNormalization as one node"),
    "second output": (make_graph([node("LayerNormalization", ["x", "w"], ["n", "m"]),
                                  helper.make_node("Add", ["n", "m"], ["y"])], inputs=X,
                                 weights={"w": np.ones(16, np.float32)}),
                      "LayerNormalization", "FLOAT", "second output", "first output only"),
    "cubic": (make_graph([node("Resize", ["pixel_values", "", "s"], mode="cubic")], inputs=IMAGE,
                         weights={"s": np.array([1, 1, 2, 2], np.float32)}),
              "Resize", "FLOAT", "mode cubic", "nearest or linear"),
    "antialias": (make_graph([node("Resize", ["pixel_values", "", "s"], mode="linear", antialias=1)], inputs=IMAGE,
                             weights={"s": np.array([1, 1, 2, 2], np.float32)}),
                  "Resize", "FLOAT", "antialiasing", "before they are given"),
    "in a branch": (_branches(), "Unique", "FLOAT", "is not supported by its parser", "replace it"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_each_bad_graph_is_refused_by_node_operator_type_and_remedy(name: str) -> None:
    proto, op, dtype, problem, remedy = BAD[name]
    (found,) = lint(proto, NEW)
    assert (found.node, found.op, found.dtype, found.level) == ("the_node", op, dtype, "refused")
    assert problem in found.problem
    assert remedy in found.remedy
    with pytest.raises(VerificationError) as error:
        check(proto, NEW)
    assert str(error.value) == f"TensorRT 10.0 cannot take the graph: {found.line()}"


def test_versions_differ_as_their_documents_do() -> None:
    proto = BAD["newer operator"][0]
    assert [len(lint(proto, parse_version(v))) for v in ("10.14", "10.15", "11.x")] == [1, 0, 0]
    assert not {"Attention", "RMSNormalization"} & set(operators((10, 13)))
    assert "Attention" in operators((10, 14))
    bf16 = make_graph([node("Erf", ["x"])], inputs=of(TensorProto.BFLOAT16), opset=13)
    assert lint(bf16, NEW) == []
    (found,) = lint(bf16, OLD)
    assert (found.dtype, "8.6" in found.problem) == ("BFLOAT16", True)
    # 8.6 lowers INT64 to INT32
    assert lint(make_graph([node("Abs", ["x"])], inputs=of(TensorProto.INT64), opset=13), OLD) == []


def test_opset_and_ir_are_capped() -> None:
    proto = make_graph([node("Erf", ["x"])], inputs=X, opset=22)
    proto.ir_version = 10
    assert [(f.op, f.dtype) for f in lint(proto, NEW)] == [("opset", "22"), ("IR", "10")]
    assert lint(proto, parse_version("10.15")) == []


def test_many_findings_are_counted_and_a_name_cannot_break_the_line() -> None:
    nodes = [helper.make_node("Unique", ["x"], [f"y{i}"], name=f"a\nb{i}") for i in range(3)]
    with pytest.raises(VerificationError, match=r"`a\\nb0` \(Unique, FLOAT\).*\(2 more;") as error:
        check(make_graph(nodes, inputs=X), NEW)
    assert "\n" not in str(error.value)


def test_a_node_without_a_name_is_called_by_its_output() -> None:
    (found,) = lint(make_graph([helper.make_node("Unique", ["x"], ["out"])], inputs=X), NEW)
    assert found.node == "out"


def test_files_that_are_none(tmp_path: Any) -> None:
    (tmp_path / "x.onnx").write_bytes(b"\xff\xfenot a protobuf")
    (tmp_path / "empty.onnx").write_bytes(b"")
    for name, text in (("x", "not a readable ONNX file"), ("empty", "no graph"), ("absent", "there is no file")):
        with pytest.raises(DataError, match=text):
            load(tmp_path / f"{name}.onnx")


@pytest.mark.parametrize("text", ["9.1", "12", "10.99", "8.5", "8", "ten", "10.3\n--x"])
def test_other_versions_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_version(text)
    assert "\n" not in str(error.value)


def test_versions_are_read() -> None:
    found = {t: parse_version(t).version for t in ("10", "10.x", "10.3", "10.3.0.26", "11.x", "8.6", "8.6.1")}
    assert found == {"10": "10.0", "10.x": "10.0", "10.3": "10.3", "10.3.0.26": "10.3", "11.x": "11.0",
                     "8.6": "8.6", "8.6.1": "8.6"}  # fmt: skip


def test_lowering_keeps_values_and_refuses_what_17_cannot_say() -> None:
    import onnxruntime

    nodes = [
        helper.make_node("ReduceMean", ["x", "a"], ["m"], keepdims=0, noop_with_empty_axes=0, name="mean"),
        helper.make_node("Split", ["m"], ["p", "q"], axis=1, num_outputs=2, name="split"),
        helper.make_node("Mul", ["p", "q"], ["y"], name="mul"),
    ]
    proto = make_graph(nodes, inputs=X, weights={"a": np.array([1])})
    x = np.random.default_rng(0).standard_normal((2, 4, 16)).astype(np.float32)
    lower(proto, ir_version=8)
    assert (proto.opset_import[0].version, lint(proto, OLD)) == (17, [])
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8]))
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    mean = x.mean(1)
    np.testing.assert_allclose(session.run(None, {"x": x})[0], mean[:, :8] * mean[:, 8:], rtol=1e-5)
    for op, inputs in (("Mish", ["x"]), ("Pad", ["x", "p", "", "a"])):
        proto = make_graph([node(op, inputs)], inputs=X, weights={"a": np.array([1]), "p": np.array([1, 1])})
        with pytest.raises(UsageError, match=rf"8.6.*`the_node` \({op} of opset 18\); give --trt 10.x"):
            lower(proto, ir_version=8)
