"""Turns products of tokens with a weight and a bias into Gemm, whose bias costs no pass of its own.

ONNX Runtime's own fusion of MatMul and Add into Gemm takes matrices only, not (batch, tokens, channels). Its fusion of
a block into one Attention wants MatMul and Add, so this is for graphs in which that finds nothing (rotary embedding).
A packed product whose halves are taken apart, as gate and value of SwiGLU, becomes two: Split copies both on a CPU.
"""

from collections import Counter

import numpy as np
import onnx
from onnx import helper, numpy_helper

from vtk_export.graph.precision import infer


def split_products(proto: onnx.ModelProto) -> int:
    """Rewrite MatMul, Add and Split of the last axis as a MatMul and Add for each part, in place; return how many.

    The matrix and the vector are cut, so that the file grows by nothing.
    """
    graph = proto.graph
    shapes = _shapes(proto)
    weights = {tensor.name: tensor for tensor in graph.initializer}
    readers = _readers(graph)
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(value.name for value in graph.output)
    made: dict[int, list[onnx.NodeProto]] = {}
    gone: set[int] = set()
    for node in graph.node:
        add = _bias_of(node, shapes, weights, readers, uses)
        after = [] if add is None else readers.get(add.output[0], [])
        if add is None or len(after) != 1 or uses[add.output[0]] != 1 or not _halves(after[0], shapes, weights):
            continue
        split = after[0]
        x, weight = node.input
        bias = next(name for name in add.input if name != node.output[0])
        if uses[weight] != 1 or uses[bias] != 1:
            continue
        parts = len(split.output)
        matrices = np.split(numpy_helper.to_array(weights[weight]), parts, axis=1)
        vectors = np.split(numpy_helper.to_array(weights[bias]), parts)
        made[id(split)] = []
        for i, (matrix, vector, out) in enumerate(zip(matrices, vectors, split.output, strict=True)):
            names = f"{weight}_{i}", f"{bias}_{i}"
            for name, array in zip(names, (matrix, vector), strict=True):
                graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
            made[id(split)] += [
                helper.make_node("MatMul", [x, names[0]], [f"{out}_product"], name=f"{node.name}_part_{i}"),
                helper.make_node("Add", [f"{out}_product", names[1]], [out], name=f"{add.name}_part_{i}"),
            ]
        gone |= {id(node), id(add)}
        for name in (weight, bias):
            graph.initializer.remove(weights.pop(name))
    nodes = [each for node in graph.node if id(node) not in gone for each in made.get(id(node), [node])]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    return len(made)


def _halves(node: onnx.NodeProto, shapes: dict[str, list[int]], weights: dict[str, onnx.TensorProto]) -> bool:
    """Return whether a node cuts its last axis into equal parts."""
    if node.op_type != "Split":
        return False
    axis = next((entry.i for entry in node.attribute if entry.name == "axis"), 0)
    rank = len(shapes.get(node.input[0], []))
    if rank != 3 or axis % rank != rank - 1:
        return False
    if len(node.input) > 1 and node.input[1]:
        sizes = weights.get(node.input[1])
        return sizes is not None and len(set(numpy_helper.to_array(sizes).tolist())) == 1
    return shapes[node.input[0]][2] % len(node.output) == 0


def bias_products(proto: onnx.ModelProto) -> int:
    """Rewrite MatMul and Add of (batch, N, K) with fixed N as Gemm of (batch · N, K), in place; return how many.

    Reshapes stand around each Gemm; they move nothing.
    """
    graph = proto.graph
    shapes = _shapes(proto)
    weights = {tensor.name: tensor for tensor in graph.initializer}
    readers = _readers(graph)
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(value.name for value in graph.output)
    rows: dict[str, str] = {}  # value to its form of two axes
    fixed: set[str] = set()
    gone: set[int] = set()
    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in graph.node:
        if id(node) in gone:
            continue
        add = _bias_of(node, shapes, weights, readers, uses)
        if add is None:
            nodes.append(node)
            continue
        x, weight = node.input
        bias = next(name for name in add.input if name != node.output[0])
        tokens, width = shapes[x][1], int(weights[weight].dims[1])
        if x not in rows:
            rows[x] = f"{x}_rows"
            nodes.append(helper.make_node("Reshape", [x, _shape(graph, fixed, [-1, shapes[x][2]])], [rows[x]],
                                          name=rows[x]))  # fmt: skip
        y = add.output[0]
        nodes.append(helper.make_node("Gemm", [rows[x], weight, bias], [f"{y}_rows"], name=f"{node.name}_with_bias"))
        nodes.append(helper.make_node("Reshape", [f"{y}_rows", _shape(graph, fixed, [-1, tokens, width])], [y],
                                      name=f"{y}_tokens"))  # fmt: skip
        gone.add(id(add))
        count += 1
    nodes = _without_middle(nodes, graph)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    return count


def _without_middle(nodes: list[onnx.NodeProto], graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Let a Reshape of a Reshape read what that one reads, and drop those that nothing reads any more."""
    constants = {t.name: numpy_helper.to_array(t) for t in graph.initializer if len(t.dims) == 1 and t.dims[0] < 9}
    makers = {name: node for node in nodes for name in node.output}
    for node in nodes:
        before = makers.get(node.input[0]) if node.op_type == "Reshape" else None
        if (
            before is not None
            and before.op_type == "Reshape"
            and (constants.get(node.input[1], np.zeros(1)) != 0).all()
        ):
            node.input[0] = before.input[0]
    read = {name for node in nodes for name in node.input} | {value.name for value in graph.output}
    return [node for node in nodes if node.op_type != "Reshape" or node.output[0] in read]


def _bias_of(
    node: onnx.NodeProto, shapes: dict[str, list[int]], weights: dict[str, onnx.TensorProto],
    readers: dict[str, list[onnx.NodeProto]], uses: Counter[str],
) -> onnx.NodeProto | None:  # fmt: skip
    """Return the sum of a product of tokens with a constant vector, None where it is no such product."""
    if node.op_type != "MatMul" or node.input[1] not in weights or len(weights[node.input[1]].dims) != 2:
        return None
    shape = shapes.get(node.input[0], [])
    if len(shape) != 3 or min(shape[1:]) < 1 or uses[node.output[0]] != 1:
        return None
    after = readers.get(node.output[0], [])
    if len(after) != 1 or after[0].op_type != "Add":
        return None
    others = [name for name in after[0].input if name != node.output[0]]
    width = int(weights[node.input[1]].dims[1])
    known = len(others) == 1 and others[0] in weights and list(weights[others[0]].dims) == [width]
    return after[0] if known else None


def _shapes(proto: onnx.ModelProto) -> dict[str, list[int]]:
    """Return the axes of every value of known rank, 0 for those that are not fixed."""
    inferred = infer(proto)
    return {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*inferred.input, *inferred.value_info, *inferred.output)
        if value.type.tensor_type.HasField("shape")
    }


def _readers(graph: onnx.GraphProto) -> dict[str, list[onnx.NodeProto]]:
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    return readers


def _shape(graph: onnx.GraphProto, fixed: set[str], dims: list[int]) -> str:
    """Return the name of a constant shape, added on first use."""
    name = "rows_of_" + "_".join(str(dim) for dim in dims[1:])
    if name not in fixed:
        graph.initializer.append(numpy_helper.from_array(np.array(dims, np.int64), name))
        fixed.add(name)
    return name
