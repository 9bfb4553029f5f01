"""Checks that e4m3 stands where TensorRT multiplies it: in tokens and weight, each behind a DequantizeLinear.

Sources: "Explicit Quantization" and "Working with Quantized Types" in NVIDIA's TensorRT documentation (Q and DQ in
pairs, a DequantizeLinear between a pre-quantised weight and its product, symmetric scales) and IQuantizeLayer and
IDequantizeLayer in its API (a scale is one positive constant, or a vector of them along an axis). A product whose other
factor is no e4m3, or a pair that no product reads, is not refused: it runs in the wider type, and was rounded for
nothing.
"""

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto

from vtk_export.lint.finding import REFUSED, SLOW, Finding
from vtk_export.lint.graph_view import View, attribute, type_name

_KIND = TensorProto.FLOAT8E4M3FN
_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv"})
_MOVES = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Cast"})


def fp8(view: View) -> Iterator[Finding]:
    """Yield the reasons why values in e4m3 are not multiplied in e4m3; graphs without e4m3 have none."""
    for node in view.graph.node:
        if node.op_type == "QuantizeLinear" and view.type(node.output[0]) == _KIND:
            yield from _quantized(view, node)
        elif node.op_type == "DequantizeLinear" and view.type(node.input[0]) == _KIND:
            yield from _dequantized(view, node)
        elif node.op_type in _PRODUCTS:
            yield from _product(view, node)


def _quantized(view: View, node: onnx.NodeProto) -> Iterator[Finding]:
    others = [reader for reader in view.readers.get(node.output[0], []) if reader.op_type != "DequantizeLinear"]
    if others:
        yield _finding(view, node, f"is read by {others[0].op_type} as e4m3",
                       "let DequantizeLinear alone read it, with the same scale", REFUSED)  # fmt: skip
    if (size := _scales(view, node.input[1])) is None:
        yield _finding(view, node, "has a scale that is computed in the graph", "make it a constant", REFUSED)
    elif size > 1:
        yield _finding(
            view, node, f"has {size} scales for what tokens are rounded to", "give tokens one scale", REFUSED
        )


def _dequantized(view: View, node: onnx.NodeProto) -> Iterator[Finding]:
    maker = view.makers.get(node.input[0])
    if maker is not None and maker.op_type == "QuantizeLinear":
        if maker.input[1] != node.input[1] and not _equal(view, maker.input[1], node.input[1]):
            yield _finding(view, node, "has another scale than the QuantizeLinear before it", "give both one scale",
                           REFUSED)  # fmt: skip
    else:
        yield from _weight(view, node)
    if not list(_factors(view, node.output[0])):
        yield _finding(
            view, node, "is read by no product, so that rounding to e4m3 gains nothing", "leave the pair out"
        )


def _weight(view: View, node: onnx.NodeProto) -> Iterator[Finding]:
    size, shape = _scales(view, node.input[1]), view.shape(node.input[0])
    values = view.number(node.input[1])
    if size is None:
        yield _finding(view, node, "has a scale that is computed in the graph", "make it a constant", REFUSED)
    elif values is not None and not (values > 0).all():
        yield _finding(
            view, node, "has a scale that is not positive", "give an empty channel any positive one", REFUSED
        )
    elif size > 1 and shape is not None:
        axis = attribute(node, "axis", 1)
        for product, place in _factors(view, node.output[0]):
            across = attribute(product, "transB", 0) if product.op_type == "Gemm" else 0
            outputs = 0 if product.op_type == "Conv" or across else len(shape) - 1
            if place == 1 and isinstance(axis, int) and axis % len(shape) != outputs:
                yield _finding(view, node, f"has scales along axis {axis}, which the product sums over",
                               f"give scales to its outputs, along axis {outputs}", REFUSED)  # fmt: skip


def _product(view: View, node: onnx.NodeProto) -> Iterator[Finding]:
    eight = [_from_e4m3(view, name) for name in node.input[:2]]
    if any(eight) and not all(eight):
        which = "its weight" if eight[0] else "its tokens"
        yield _finding(view, node, f"reads e4m3 but for {which}, and so multiplies in {type_name(view.dtype(node))}",
                       f"round {which} to e4m3 as well")  # fmt: skip


def _factors(view: View, name: str) -> Iterator[tuple[onnx.NodeProto, int]]:
    """Yield the products that read a value, and as which factor, also behind a change of its shape."""
    for reader in view.readers.get(name, []):
        if reader.op_type in _PRODUCTS:
            yield reader, list(reader.input).index(name)
        elif reader.op_type in _MOVES:
            yield from _factors(view, reader.output[0])


def _from_e4m3(view: View, name: str) -> bool:
    while (node := view.makers.get(name)) is not None and node.op_type in _MOVES:
        name = node.input[0]
    return node is not None and node.op_type == "DequantizeLinear" and view.type(node.input[0]) == _KIND


def _scales(view: View, name: str) -> int | None:
    """Return how many numbers a constant scale has, None where it is computed."""
    shape = view.shape(name)
    return None if name not in view.weights or shape is None else int(np.prod([n or 0 for n in shape], dtype=np.int64))


def _equal(view: View, one: str, other: str) -> bool:
    a, b = view.number(one), view.number(other)
    return a is not None and b is not None and np.array_equal(a, b)


def _finding(view: View, node: onnx.NodeProto, problem: str, remedy: str, level: str = SLOW) -> Finding:
    dtype = view.type(node.output[0]) if node.op_type == "QuantizeLinear" else view.dtype(node)
    return Finding(node.name or node.output[0], node.op_type, type_name(dtype), problem, remedy, level)
