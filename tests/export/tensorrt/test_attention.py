"""The form of attention that TensorRT fuses, and each way to miss it."""

import copy
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from tests.export.tensorrt._graphs import make_attention
from vtk_export.graph.precision import to_half
from vtk_export.lint.linter import lint
from vtk_export.tensorrt.config import parse_version

NEW = parse_version("10.x")


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize("mask", [False, True])
def test_the_fused_form_is_accepted(dtype: int, mask: bool) -> None:
    assert lint(make_attention(dtype, mask=mask), NEW) == []
    assert lint(make_attention(dtype, scale=("k",)), NEW) == []


@pytest.mark.parametrize(
    ("change", "node", "op", "dtype", "problem", "remedy", "level"),
    [
        ({"packed": True}, "make_scores", "MatMul", "FLOAT16", "three separate products", "in three", "slow"),
        ({"scale": ("q", "k")}, "make_scaled_k", "Mul", "FLOAT16", "q is scaled as well", "on q", "slow"),
        ({"scale": ("scores",)}, "make_scaled_scores", "Mul", "FLOAT16", "after the product", "scale q", "slow"),
        ({"maximum": True}, "make_lowered", "Sub", "FLOAT16", "subtracts the maximum", "leave it out", "slow"),
        ({"head": 20}, "make_scores", "MatMul", "FLOAT16", "heads of 20 channels", "steps of 8", "slow"),
        ({"head": 8}, "make_scores", "MatMul", "FLOAT16", "heads of 8 channels", "16 to 256", "slow"),
        ({"axis": 2}, "make_share", "Softmax", "FLOAT", "not over the last axis", "last axis", "refused"),
        ({"casts": False, "dtype": TensorProto.BFLOAT16}, "make_share", "Softmax", "BFLOAT16", "accumulates in bf16",
         "cast its input to FLOAT", "refused"),
    ],
    ids=["packed", "scale on both", "scale after", "maximum", "head 20", "head 8", "axis", "bf16 softmax"],
)  # fmt: skip
def test_each_way_to_miss_it_is_named(
    change: dict[str, Any], node: str, op: str, dtype: str, problem: str, remedy: str, level: str
) -> None:
    (found,) = lint(make_attention(**change), NEW)
    assert (found.node, found.op, found.dtype, found.level) == (node, op, dtype, level)
    assert problem in found.problem
    assert remedy in found.remedy


def test_softmax_of_logits_is_no_attention() -> None:
    proto = make_attention()
    proto.graph.node.append(helper.make_node("Softmax", ["y"], ["p"], axis=1))
    proto.graph.output[0].name = "p"
    assert lint(proto, NEW) == []


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("version", ["10.x", "10.15", "11.x"])
def test_what_the_exporter_makes_of_a_fused_model_is_accepted(fused: onnx.ModelProto, dtype: str, version: str) -> None:
    proto = copy.deepcopy(fused)
    if dtype != "fp32":
        to_half(proto, dtype)
    proto.ir_version = 9
    assert lint(proto, parse_version(version)) == []
    ops = [node.op_type for node in proto.graph.node]
    assert (ops.count("Softmax"), ops.count("LayerNormalization")) == (1, 3)


def test_the_plain_form_of_torch_is_refused_for_computed_shapes(exported_calm: Any) -> None:
    proto = exported_calm.proto
    proto.ir_version = 9
    found = lint(proto, NEW)
    assert {(f.op, f.level) for f in found} == {("Reshape", "refused"), ("Mul", "slow"), ("MatMul", "slow")}
    assert {f.dtype for f in found} == {"FLOAT"}
