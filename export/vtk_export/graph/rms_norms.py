"""Writes RMSNorm in the operators that ONNX Runtime fuses into one SimplifiedLayerNormalization."""

from collections import Counter

import numpy as np
import onnx
from onnx import helper, numpy_helper

from vtk_export.graph.precision import infer


def divide_rms_norms(proto: onnx.ModelProto) -> int:
    """Turn x · (1 / √(mean(x²) + ε)) into x / √(mean(x²) + ε) · weight, in place; return how many there were.

    torch's exporter writes the reciprocal, ONNX Runtime looks for the quotient, times a weight; where the weight is
    folded into the next product it is a vector of ones. The sum is the same up to rounding.
    """
    graph = proto.graph
    makers = {name: node for node in graph.node for name in node.output}
    uses = Counter(name for node in graph.node for name in node.input)
    weights = {tensor.name: tensor for tensor in graph.initializer}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    inferred = infer(proto)
    widths = {
        value.name: value.type.tensor_type.shape.dim[-1].dim_value
        for value in (*inferred.value_info, *inferred.input, *inferred.output)
        if value.type.tensor_type.shape.dim
    }
    extra: dict[str, onnx.NodeProto] = {}  # output of a quotient to the product that follows it
    count = 0
    for node in graph.node:
        x = _normalized(node, makers, uses)
        if x is None:
            continue
        root = next(makers[name] for name in node.input if name != x or makers.get(name, node).op_type == "Reciprocal")
        node.op_type = "Div"
        node.input[:] = [x, root.input[0]]
        after = readers.get(node.output[0], [])
        scaled = len(after) == 1 and after[0].op_type == "Mul" and any(
            name in weights and len(weights[name].dims) == 1 for name in after[0].input
        )  # fmt: skip
        width = widths.get(x, 0)
        if not scaled and width:
            name = f"ones_of_{width}"
            if name not in weights:
                graph.initializer.append(numpy_helper.from_array(np.ones(width, np.float32), name))
                weights[name] = graph.initializer[-1]
            out = node.output[0]
            node.output[0] = f"{out}_unscaled"
            extra[node.output[0]] = helper.make_node("Mul", [node.output[0], name], [out], name=f"{out}_scaled")
        count += 1
    if count:
        dead = {n.output[0] for n in graph.node if n.op_type == "Reciprocal"}
        dead -= {name for n in graph.node for name in n.input} | {value.name for value in graph.output}
        nodes = []
        for node in graph.node:
            if node.output[0] not in dead:
                nodes += [node, extra[node.output[0]]] if node.output[0] in extra else [node]
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)
    return count


def _normalized(node: onnx.NodeProto, makers: dict[str, onnx.NodeProto], uses: Counter[str]) -> str | None:
    """Return x where ``node`` computes x · (1 / √(mean(x²) + ε)) over the last axis."""
    if node.op_type != "Mul":
        return None
    for x, other in (tuple(node.input), tuple(reversed(node.input))):
        path = []
        name = other
        for kind in ("Reciprocal", "Sqrt", "Add", "ReduceMean", "Pow"):
            maker = makers.get(name)
            if maker is None or maker.op_type != kind or uses[maker.output[0]] != 1:
                break
            path.append(maker)
            name = next((i for i in maker.input if makers.get(i) is not None), "") if kind == "Add" else maker.input[0]
        else:
            if name == x:
                return x
    return None
