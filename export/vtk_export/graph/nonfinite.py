"""Adds nodes that return a row of NaN for an image with NaN or infinite pixels, where the graph would return numbers.

Rounding to int8 turns NaN into a number, and so may a maximum with 0, which ONNX leaves open. The label of such a row
would be wrong.
"""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_IMAGES = "pixel_values"
_HIDES = frozenset(
    "Relu LeakyRelu PRelu Clip Max Min MaxPool HardSwish HardSigmoid ThresholdedRelu GlobalMaxPool".split()
)


def may_hide(proto: onnx.ModelProto) -> bool:
    """Return whether a graph has operators that a runtime may compute without regard to NaN."""
    return any(node.op_type in _HIDES for node in proto.graph.node)


def mark_rows(proto: onnx.ModelProto, *, clean: bool = False) -> None:
    """Add to each row of every float output 0 × its image's pixels, summed: 0, or NaN. In place.

    Args:
        proto: with an input ``pixel_values`` (batch, C, H, W) and outputs (batch, n).
        clean: also let the graph read 0 in place of such pixels: where ranges are found over all images of a call, one
            NaN would reach every row.
    """
    graph = proto.graph
    kind = next(value for value in graph.input if value.name == _IMAGES).type.tensor_type.elem_type
    zero = np.zeros((), helper.tensor_dtype_to_np_dtype(kind))
    graph.initializer.extend([
        numpy_helper.from_array(zero, "mark_zero"), numpy_helper.from_array(np.array([1], np.int64), "mark_axes"),
    ])  # fmt: skip
    first = [
        helper.make_node("Mul", [_IMAGES, "mark_zero"], ["mark_pixels"], name="mark_pixels"),
        helper.make_node("Flatten", ["mark_pixels"], ["mark_flat"], name="mark_flat", axis=1),
        helper.make_node("ReduceSum", ["mark_flat", "mark_axes"], ["mark_row"], name="mark_row", keepdims=1),
    ]
    body = list(graph.node)
    if clean:
        first += [
            helper.make_node("IsNaN", ["mark_pixels"], ["mark_where"], name="mark_where"),
            helper.make_node("Where", ["mark_where", "mark_zero", _IMAGES], ["mark_clean"], name="mark_clean"),
        ]
        _rename(body, _IMAGES, "mark_clean")
    last = []
    for value in graph.output:
        if value.type.tensor_type.elem_type not in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16):
            continue
        _rename(body, value.name, f"{value.name}_unmarked")
        row = "mark_row"
        if value.type.tensor_type.elem_type != kind:
            row = f"mark_row_{value.name}"
            to = value.type.tensor_type.elem_type
            last.append(helper.make_node("Cast", ["mark_row"], [row], name=row, to=to))
        last.append(helper.make_node("Add", [f"{value.name}_unmarked", row], [value.name], name=f"mark_{value.name}"))
    del graph.node[:]
    graph.node.extend([*first, *body, *last])


def _rename(nodes: list[onnx.NodeProto], old: str, new: str) -> None:
    for node in nodes:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                if name == old:
                    names[i] = new
