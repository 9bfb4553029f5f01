"""Counts the memory of an ONNX file's weights and of its live values, from its graph.

As the graph stands in the file: a run time that fuses operators has fewer values, and one may keep a weight twice, once
in an order of its own.
"""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import onnx

from vtk.profiling.live_values import peak_of
from vtk.profiling.onnx_work import without_data

_VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity")
"""Operators whose output is the memory of their first input."""


def memory_of_onnx(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int | None]:
    """Return bytes of weights, and of the most values that are alive at once, inputs left out.

    Args:
        path: of the file; external data are not read.
        shapes: of the inputs, batch included.

    Returns:
        The latter None where the shape or type of a value cannot be inferred, or an operator has a graph inside.
    """
    proto = onnx.load(path, load_external_data=False)
    graph = proto.graph
    weights = {t.name: math.prod(t.dims) * _bytes_of(t.data_type) for t in graph.initializer}
    total = sum(weights.values())
    # written beside the graph for one batch or none, they would be believed
    del graph.value_info[:]
    light = without_data(proto, shapes)
    for output in light.graph.output:
        output.type.tensor_type.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(light, data_prop=True).graph
    except (onnx.shape_inference.InferenceError, ValueError):
        return total, None
    sizes: dict[str, int] = {}
    for value in (*inferred.value_info, *inferred.output):
        kind = value.type.tensor_type
        if kind.HasField("shape") and all(d.HasField("dim_value") for d in kind.shape.dim):
            sizes[value.name] = math.prod(d.dim_value for d in kind.shape.dim) * _bytes_of(kind.elem_type)
    fixed, given, owner = set(weights), {value.name for value in graph.input} - set(weights), dict[str, str]()
    uses: Counter[str] = Counter()
    for node in graph.node:
        if any(a.HasField("g") for a in node.attribute):
            return total, None
        for name in filter(None, node.output):
            if node.op_type == "Constant" or (node.input and all(one in fixed for one in filter(None, node.input))):
                fixed.add(name)  # folded into a weight when the file is loaded
            elif node.op_type in _VIEWS and node.input[0] in given:
                given.add(name)  # the caller's memory
            elif name not in sizes:
                return total, None
            else:
                owner[name] = owner.get(node.input[0], name) if node.op_type in _VIEWS else name
        uses.update(owner[name] for name in node.input if name in owner)
    uses.update(owner[value.name] for value in graph.output if value.name in owner)  # alive to the end
    return total, peak_of([(node.input, node.output) for node in graph.node], sizes, owner, uses)


def _bytes_of(kind: int) -> int:
    return onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize
