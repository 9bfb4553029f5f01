"""Reorders the exporter's nodes into the patterns that runtimes fuse."""

from collections import Counter

import numpy as np
import onnx
from onnx import numpy_helper


def reorder_gelu(graph: onnx.GraphProto) -> int:
    """Turn x · (½ · (1 + erf(x/√2))) into (x · (1 + erf(x/√2))) · ½, in place; return how many there were.

    torch's exporter writes the first, onnxruntime's fusion into one Gelu (and BiasGelu) knows only the second: without
    it a GELU is five passes over the widest activation of the model. Halving is exact, so no number changes.
    """
    makers = {name: node for node in graph.node for name in node.output}
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(value.name for value in graph.output)
    halves = {t.name for t in graph.initializer if _is(t, 0.5)}
    ones = {t.name for t in graph.initializer if _is(t, 1.0)}
    roots = {t.name for t in graph.initializer if _is(t, np.sqrt(2.0))}
    count = 0
    for last in graph.node:
        if last.op_type != "Mul":
            continue
        for x, gate in (tuple(last.input), tuple(reversed(last.input))):
            half = makers.get(gate)
            if half is None or half.op_type != "Mul" or uses[gate] != 1:
                continue
            sums = [name for name in half.input if name not in halves]
            factor = [name for name in half.input if name in halves]
            if len(sums) != 1 or not _is_one_plus_erf(makers, sums[0], x, ones, roots):
                continue
            half.input[:] = [x, sums[0]]
            last.input[:] = [gate, factor[0]]
            count += 1
            break
    return count


def reorder_bias(graph: onnx.GraphProto) -> int:
    """Turn (x + b) + p·W into x + (p·W + b), in place; return how many there were.

    A fused block adds the bias of its last layer to the residual first. onnxruntime has one node for an int8 product
    and its bias, but only where they are neighbours. The sum is the same up to rounding.
    """
    makers = {name: node for node in graph.node for name in node.output}
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(value.name for value in graph.output)
    axes = {t.name: len(t.dims) for t in graph.initializer}
    moved: dict[str, onnx.NodeProto] = {}  # output of the last sum → the sum with b, which now needs the product
    for last in graph.node:
        if last.op_type != "Add":
            continue
        for shifted, product in (tuple(last.input), tuple(reversed(last.input))):
            add, matmul = makers.get(shifted), makers.get(product)
            if add is None or add.op_type != "Add" or matmul is None or matmul.op_type != "MatMul":
                continue
            biases = [name for name in add.input if axes.get(name) == 1]
            others = [name for name in add.input if name not in axes]
            alone = uses[shifted] == uses[product] == 1
            if alone and len(biases) == len(others) == 1 and axes.get(matmul.input[1]) == 2:
                add.input[:] = [product, biases[0]]
                last.input[:] = [others[0], shifted]
                moved[last.output[0]] = add
                break
    early = {add.output[0] for add in moved.values()}
    nodes = []
    for node in graph.node:
        if node.output[0] not in early:
            nodes += [moved[node.output[0]], node] if node.output[0] in moved else [node]
    if moved:
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)
    return len(moved)


def complete_norms(graph: onnx.GraphProto) -> int:
    """Give a bias of zeros to every LayerNormalization that has none, in place; return how many there were.

    The bias is an optional input, and a folded norm needs none. But `onnxruntime.transformers.optimizer`, which makes
    one Attention of a block's products, reads it unasked and ends with an IndexError where it is absent. Adding zeros
    changes no number.
    """
    weights = {t.name: t for t in graph.initializer}
    added: dict[tuple[int, ...], str] = {}
    count = 0
    for node in graph.node:
        if node.op_type != "LayerNormalization" or (len(node.input) > 2 and node.input[2]):
            continue
        scale = weights.get(node.input[1])
        if scale is None:
            continue
        key = (scale.data_type, *scale.dims)
        if key not in added:
            added[key] = f"no_bias_{len(added)}"
            zeros = np.zeros_like(numpy_helper.to_array(scale))
            graph.initializer.append(numpy_helper.from_array(zeros, added[key]))
        node.input[:] = [*node.input[:2], added[key]]
        count += 1
    return count


def _is_one_plus_erf(makers: dict[str, onnx.NodeProto], name: str, x: str, ones: set[str], roots: set[str]) -> bool:
    """Return whether ``name`` is 1 + erf(x / √2)."""
    add = makers.get(name)
    if add is None or add.op_type != "Add" or not ones.intersection(add.input):
        return False
    erf = next((makers[i] for i in add.input if i in makers), None)
    if erf is None or erf.op_type != "Erf":
        return False
    div = makers.get(erf.input[0])
    return div is not None and div.op_type == "Div" and div.input[0] == x and div.input[1] in roots


def _is(tensor: onnx.TensorProto, value: float) -> bool:
    if tensor.data_type != onnx.TensorProto.FLOAT or int(np.prod(tensor.dims)) != 1:
        return False
    return bool(np.isclose(numpy_helper.to_array(tensor).item(), value, rtol=1e-6, atol=0))
