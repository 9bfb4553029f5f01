"""Looks up producers, consumers, types, shapes and constants in an ONNX graph, for the linter."""

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from vtk_export.graph.precision import infer

_SMALL = 4096


class View:
    """Lookups in one graph; nothing is changed.

    Attributes:
        graph: the graph.
        makers: value to the node that makes it; inputs and weights have none.
        readers: value to the nodes that read it.
        weights: names of initializers, and of outputs of ``Constant``.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.graph = proto.graph
        self.makers = {name: node for node in self.graph.node for name in node.output if name}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)
        self._tensors = {t.name: t for t in self.graph.initializer}
        self._tensors |= {node.output[0]: a.t for node in self.graph.node if node.op_type == "Constant"
                          for a in node.attribute if a.name == "value"}  # fmt: skip
        self.weights = frozenset(self._tensors) | {n.output[0] for n in self.graph.node if n.op_type == "Constant"}
        inferred = infer(proto)
        self._types: dict[str, int] = {t.name: t.data_type for t in self.graph.initializer}
        self._shapes: dict[str, tuple[int | None, ...]] = {n: tuple(t.dims) for n, t in self._tensors.items()}
        for value in (*inferred.value_info, *inferred.input, *inferred.output):
            kind = value.type.tensor_type
            self._types.setdefault(value.name, kind.elem_type)
            if kind.HasField("shape"):
                dims = tuple(d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim)
                self._shapes.setdefault(value.name, dims)

    def type(self, name: str) -> int:
        """Return ONNX's number of a value's type, 0 where inference does not know it."""
        return self._types.get(name, TensorProto.UNDEFINED)

    def shape(self, name: str) -> tuple[int | None, ...] | None:
        """Return a value's axes, None for those that are not fixed; None where even their count is not known."""
        return self._shapes.get(name)

    def number(self, name: str) -> np.ndarray | None:
        """Return a small constant; None for another value, a large weight, or one that is kept beside the file."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.external_data or int(np.prod(tensor.dims, dtype=np.int64)) > _SMALL:
            return None
        return numpy_helper.to_array(tensor)

    def dtype(self, node: onnx.NodeProto) -> int:
        """Return the type that a node works in: of its data input, or of its output where it has none."""
        skip = 1 if node.op_type == "Where" else 0
        names = [*node.input[skip:], *node.output]
        return next((self.type(name) for name in names if name), TensorProto.UNDEFINED)


def attribute(node: onnx.NodeProto, name: str, default: object = None) -> object:
    """Return an attribute's value, strings as text."""
    for entry in node.attribute:
        if entry.name == name:
            value = onnx.helper.get_attribute_value(entry)
            return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return default


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs that a node of control flow holds."""
    for entry in node.attribute:
        if entry.HasField("g"):
            yield entry.g
        yield from entry.graphs


def type_name(number: int) -> str:
    """Return ``FLOAT16`` for its number, and ``unknown type`` where there is none."""
    return TensorProto.DataType.Name(number) if number else "unknown type"
