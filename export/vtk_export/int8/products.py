"""Finds the products of an fp32 graph that int8 rounds, in groups that read the same activation."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper


@dataclass(frozen=True)
class Product:
    """A product or convolution.

    Attributes:
        output: name of its value, which identifies it.
        inputs: positions of its inputs that are activations.
        weight: name of its constant, "" for a product of two activations.
        axis: of the weight's output channels.
    """

    output: str
    inputs: tuple[int, ...]
    weight: str = ""
    axis: int = 0


@dataclass(frozen=True)
class Group:
    """The products that read one activation.

    Attributes:
        activation: its name.
        channels: its axis of channels.
        products: that read it, in the graph's order.
    """

    activation: str
    channels: int
    products: tuple[Product, ...]

    @property
    def weighted(self) -> bool:
        """Whether every product has a constant weight."""
        return all(product.weight for product in self.products)


def constants(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """Return the fp32 constants of a graph by name."""
    return {t.name: numpy_helper.to_array(t) for t in graph.initializer if t.data_type == TensorProto.FLOAT}


def count_uses(graph: onnx.GraphProto) -> Counter[str]:
    """Return how often each value is read, by nodes and as an output of the graph."""
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(value.name for value in graph.output)
    return uses


def find_groups(graph: onnx.GraphProto, *, attention: bool = False) -> list[Group]:
    """Return the groups of a graph, in its order.

    Left in float: the first product on each way from the image, whose error the whole model sees; products of single
    rows, such as the classifier's Gemm, which cost little; convolutions of one channel each; and, unless asked for, the
    two products of attention, whose inputs would be rounded for little time.

    Args:
        graph: fp32.
        attention: whether to take products of two activations.
    """
    weights = constants(graph)
    late: set[str] = set()  # values that a product is behind
    found: dict[str, list[Product]] = {}
    channels: dict[str, int] = {}
    for node in graph.node:
        behind = any(name in late for name in node.input)
        product = _product(node, weights)
        if product is not None and behind and (product.weight or attention):
            for i in product.inputs:
                found.setdefault(node.input[i], []).append(product)
                channels[node.input[i]] = 1 if node.op_type == "Conv" else -1
        if behind or (product is not None and product.weight) or _is_gemm(node, weights):
            late.update(node.output)
    return [Group(name, channels[name], tuple(products)) for name, products in found.items()]


def _is_gemm(node: onnx.NodeProto, weights: Mapping[str, np.ndarray]) -> bool:
    return node.op_type in ("Gemm", "Conv") and node.input[1] in weights


def _product(node: onnx.NodeProto, weights: Mapping[str, np.ndarray]) -> Product | None:
    if node.op_type == "Conv":
        weight = weights.get(node.input[1])
        return None if weight is None or weight.shape[1] == 1 else Product(node.output[0], (0,), node.input[1], 0)
    if node.op_type != "MatMul" or node.input[0] in weights:
        return None
    weight = weights.get(node.input[1])
    if weight is None:
        return Product(node.output[0], (0, 1))
    return Product(node.output[0], (0,), node.input[1], 1) if weight.ndim == 2 else None
