"""Divides an activation's channels by factors folded into the norm before it, and multiplies the weights by them.

Channels of one activation differ by orders of magnitude, and share one scale: the small ones would be rounded away.
SmoothQuant (Xiao et al., 2023) moves a part of that into the weights, which have a scale per output channel. Nothing is
added to the graph.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from vtk_export.int8.activations import Activation
from vtk_export.int8.products import Group, constants, count_uses


def equalize(proto: onnx.ModelProto, groups: list[Group], measured: Mapping[str, Activation], strength: float) -> int:
    """Fold factors into a graph, in place, and divide what was measured by them.

    Args:
        proto: fp32.
        groups: of its products.
        measured: their activations; changed with the graph.
        strength: SmoothQuant's exponent; 0 changes nothing.

    Returns:
        How many activations were equalised.
    """
    if not strength:
        return 0
    folder = _Folder(proto.graph)
    count = 0
    for group in groups:
        own = measured[group.activation]
        # the last block asks with the class token alone: its q reads a slice of what k and v read
        slices = [
            g for g in groups if folder.slices(g.activation, group.activation) and _width(g, measured) == len(own.most)
        ]
        family = [group, *slices]
        if not all(g.weighted and g.channels == -1 for g in family) or not folder.only_read_by(group, slices):
            continue
        largest = np.maximum(np.abs(own.least), np.abs(own.most))
        products = [product for g in family for product in g.products]
        weight = np.max([np.abs(folder.values[product.weight]).max(1) for product in products], 0)
        factors = np.maximum(largest, 1e-5) ** strength / np.maximum(weight, 1e-5) ** (1 - strength)
        factors = (factors / np.exp(np.log(factors).mean())).astype(np.float32)
        if not folder.divide(group.activation, factors):
            continue
        for product in products:
            folder.set(product.weight, folder.values[product.weight] * factors[:, None])
        for each in (measured[g.activation] for g in family):
            each.least, each.most = each.least / factors, each.most / factors
            each.parts = [part / factors for part in each.parts]
        count += len(family)
    folder.store()
    return count


def _width(group: Group, measured: Mapping[str, Activation]) -> int:
    return len(measured[group.activation].most)


class _Folder:
    """Constants of a graph, changed where only one node reads them."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph, self.values, self.uses = graph, constants(graph), count_uses(graph)
        self.makers = {name: node for node in graph.node for name in node.output}
        self.changed: set[str] = set()

    def set(self, name: str, value: np.ndarray) -> None:
        """Change a constant, or add one."""
        self.values[name] = value.astype(np.float32)
        self.changed.add(name)

    def slices(self, name: str, whole: str) -> bool:
        """Return whether a value is a slice of another one."""
        node = self.makers.get(name)
        return node is not None and node.op_type == "Slice" and node.input[0] == whole

    def only_read_by(self, group: Group, slices: list[Group]) -> bool:
        """Return whether nothing else reads an activation and slices of it, and each weight is read once."""
        weights = Counter(product.weight for g in (group, *slices) for product in g.products)
        alone = all(self.uses[name] == count == 1 for name, count in weights.items())
        own = all(self.uses[g.activation] == len(g.products) for g in slices)
        return alone and own and self.uses[group.activation] == len(group.products) + len(slices)

    def divide(self, name: str, factors: np.ndarray) -> bool:
        """Divide a value's channels by changing what makes it; return whether that is possible."""
        node = self.makers.get(name)
        if node is None:
            return False
        if node.op_type in ("LayerNormalization", "RMSNormalization"):
            given = [i for i in range(1, len(node.input)) if node.input[i]]
            return self._divide_constants(node, given, factors)
        if node.op_type == "Mul":
            vectors = [i for i in (0, 1) if self._is_vector(node.input[i], factors)]
            if vectors:
                return self._divide_constants(node, vectors[:1], factors)
            # a gate and a value, as of SwiGLU: whichever comes straight from a product
            return any(self.uses[value] == 1 and self.divide(value, factors) for value in node.input)
        if node.op_type == "Add":
            vectors = [i for i in (0, 1) if self._is_vector(node.input[i], factors)]
            other = node.input[1 - vectors[0]] if len(vectors) == 1 else ""
            if not other or self.uses[other] != 1 or not self.divide(other, factors):
                return False
            return self._divide_constants(node, vectors, factors)
        if node.op_type == "MatMul":
            weight = self.values.get(node.input[1])
            if weight is None or weight.ndim != 2 or self.uses[node.input[1]] != 1:
                return False
            self.set(node.input[1], weight / factors)
            return True
        return False

    def _is_vector(self, name: str, factors: np.ndarray) -> bool:
        return name in self.values and self.values[name].shape == factors.shape

    def _divide_constants(self, node: onnx.NodeProto, places: list[int], factors: np.ndarray) -> bool:
        if not places or not all(self._is_vector(node.input[i], factors) for i in places):
            return False
        for i in places:
            old = node.input[i]
            if self.uses[old] != 1:  # norms share a constant of ones
                node.input[i] = f"{node.output[0]}_equal_{i}"
                self.uses[old] -= 1
                self.uses[node.input[i]] = 1
            self.set(node.input[i], self.values[old] / factors)
        return True

    def store(self) -> None:
        """Write the changed constants into the graph, and drop those that nothing reads."""
        kept = [t for t in self.graph.initializer if t.name not in self.changed and self.uses[t.name]]
        new = [numpy_helper.from_array(np.ascontiguousarray(self.values[name]), name) for name in sorted(self.changed)]
        del self.graph.initializer[:]
        self.graph.initializer.extend([*kept, *new])
