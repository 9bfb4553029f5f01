"""Writes QuantizeLinear and DequantizeLinear before the products of a graph, and its weights as int8."""

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from vtk_export.int8.products import Group, Product
from vtk_export.int8.ranges import Scale


def round_weight(weight: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 codes from −127 to 127 of a weight, and the scale (out,) of each output channel."""
    others = tuple(i for i in range(weight.ndim) if i != axis)
    scale = np.abs(weight).max(others, keepdims=True) / 127
    scale = np.where(scale > 0, scale, 1).astype(np.float32)
    codes = np.clip(np.rint(weight / scale), -127, 127).astype(np.int8)
    return codes, scale.ravel()


def insert(proto: onnx.ModelProto, groups: Iterable[Group], scales: Mapping[str, Scale]) -> onnx.ModelProto:
    """Return a copy of an fp32 graph whose products read int8.

    The readers of an activation share one QuantizeLinear and one DequantizeLinear: ONNX Runtime and OpenVINO then round
    it once, and run each product in int8 with a float result.

    Args:
        proto: the graph.
        groups: products to quantise.
        scales: of their activations.
    """
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    graph = result.graph
    writer = _Writer(graph, scales)
    taken = {product.output: product for group in groups for product in group.products}
    read = {(product.output, group.activation) for group in groups for product in group.products}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        product = taken.get(node.output[0])
        if product is not None:
            nodes += writer.before(node, product, read)
        nodes.append(node)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    used = {name for node in graph.node for name in node.input}
    kept = [onnx.TensorProto.FromString(t.SerializeToString()) for t in graph.initializer if t.name in used]
    del graph.initializer[:]
    graph.initializer.extend([*kept, *writer.added])
    return result


class _Writer:
    """Makes the nodes and constants of one graph."""

    def __init__(self, graph: onnx.GraphProto, scales: Mapping[str, Scale]) -> None:
        self.weights = {t.name: t for t in graph.initializer}
        self.scales, self.added = scales, list[onnx.TensorProto]()
        self.made: dict[str, str] = {}

    def before(self, node: onnx.NodeProto, product: Product, read: set[tuple[str, str]]) -> list[onnx.NodeProto]:
        """Let a product read int8; return the nodes that have to stand before it."""
        nodes: list[onnx.NodeProto] = []
        for i in product.inputs:
            if (product.output, node.input[i]) in read:
                node.input[i] = self._activation(node.input[i], nodes)
        if product.weight:
            node.input[1] = self._weight(product, nodes)
        return nodes

    def _constant(self, name: str, value: np.ndarray) -> str:
        self.added.append(numpy_helper.from_array(value, name))
        return name

    def _activation(self, name: str, nodes: list[onnx.NodeProto]) -> str:
        if name not in self.made:
            own = self.scales[name]
            scale = self._constant(f"{name}_int8_scale", np.array(own.scale, np.float32))
            zero = self._constant(f"{name}_int8_zero", np.array(own.zero, np.int8 if own.signed else np.uint8))
            codes, self.made[name] = f"{name}_int8", f"{name}_from_int8"
            nodes.append(helper.make_node("QuantizeLinear", [name, scale, zero], [codes], name=codes))
            nodes.append(helper.make_node("DequantizeLinear", [codes, scale, zero], [self.made[name]],
                                          name=self.made[name]))  # fmt: skip
        return self.made[name]

    def _weight(self, product: Product, nodes: list[onnx.NodeProto]) -> str:
        name = product.weight
        if name not in self.made:
            codes, scale = round_weight(numpy_helper.to_array(self.weights[name]), product.axis)
            inputs = [
                self._constant(f"{name}_int8", codes), self._constant(f"{name}_int8_scale", scale),
                self._constant(f"{name}_int8_zero", np.zeros(len(scale), np.int8)),
            ]  # fmt: skip
            self.made[name] = f"{name}_from_int8"
            nodes.append(helper.make_node("DequantizeLinear", inputs, [self.made[name]], name=self.made[name],
                                          axis=product.axis))  # fmt: skip
        return self.made[name]
