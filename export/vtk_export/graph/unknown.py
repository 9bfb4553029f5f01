"""Appends the output ``unknown``: whether an image's score is below the card's threshold."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from vtk.card import Card

UNKNOWN = "unknown"


def append_unknown(proto: onnx.ModelProto, card: Card) -> None:
    """Add the output ``unknown`` (batch,), bool: max(softmax(logits / temperature)) < threshold, or NaN. In place.

    The score is computed in fp32 at any precision of the file: near 1 fp16 cannot tell scores apart. NaN has a node of
    its own: OpenVINO takes NaN ≥ 0.9 for true.

    Args:
        proto: with an output ``logits`` or ``probabilities`` (batch, classes), of any opset from 13 on.
        card: with a threshold.
    """
    assert card.threshold is not None
    graph = proto.graph
    (value,) = [v for v in graph.output if v.name in ("logits", "probabilities")]
    made, read = {name: node for node in graph.node for name in node.output}, value.name
    if value.name == "probabilities":
        # before the type of the file's outputs, but behind what hands the NaN of an image on in int8
        while made[read].op_type == "Cast":
            read = made[read].input[0]

    def add(kind: str, inputs: list[str], output: str, **attributes: object) -> str:
        graph.node.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def constant(number: object, name: str, kind: type = np.float32) -> str:
        graph.initializer.append(numpy_helper.from_array(np.array(number, kind), name))
        return name

    if read != value.name or value.type.tensor_type.elem_type != TensorProto.FLOAT:
        read = add("Cast", [read], "unknown_fp32", to=TensorProto.FLOAT)
    if value.name == "logits":
        if card.temperature != 1:
            read = add("Mul", [read, constant(1 / card.temperature, "unknown_inverse")], "unknown_by_temperature")
        read = add("Softmax", [read], "unknown_shares", axis=-1)
    opset = next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
    if opset >= 18:
        read = add("ReduceMax", [read, constant([-1], "unknown_axes", np.int64)], "unknown_score", keepdims=0)
    else:
        read = add("ReduceMax", [read], "unknown_score", axes=[-1], keepdims=0)
    below = add("Less", [read, constant(card.threshold.score, "unknown_threshold")], "unknown_below")
    add("Or", [below, add("IsNaN", [read], "unknown_nan")], UNKNOWN)
    first = value.type.tensor_type.shape.dim[0]
    batch = first.dim_value if first.HasField("dim_value") else first.dim_param
    graph.output.append(helper.make_tensor_value_info(UNKNOWN, TensorProto.BOOL, [batch]))
