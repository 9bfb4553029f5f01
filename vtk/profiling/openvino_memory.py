"""Counts the memory of an OpenVINO model's weights and of its live values, from the graph of its IR file.

As the graph stands in the file, as `onnx_memory` does of an ONNX file: what OpenVINO fuses needs less, and weights that
it rounds to bf16 or puts into an order of its own are another copy.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vtk.profiling.live_values import peak_of
from vtk.runtime.openvino_runtime import core

_VIEWS = ("Reshape", "Squeeze", "Unsqueeze")
"""Operators whose output is the memory of their first input."""


def memory_of_ir(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int | None]:
    """Return bytes of weights, and of the most values that are alive at once, inputs left out.

    Args:
        path: of the ``.xml`` file.
        shapes: of the inputs, batch included.

    Returns:
        The latter None where the shape of a value depends on other values.
    """
    model = core().read_model(path)
    constants = [op for op in model.get_ordered_ops() if op.get_type_name() == "Constant"]
    weights = sum(op.get_byte_size() for op in constants)
    try:
        model.reshape({name: list(shape) for name, shape in shapes.items()})
    except RuntimeError:
        return weights, None
    ops = [op for op in model.get_ordered_ops() if op.get_type_name() not in ("Result", "Parameter", "Constant")]
    fixed = {op.get_friendly_name() for op in constants}
    given = {value.get_node().get_friendly_name() for value in model.inputs}
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    steps: list[tuple[list[str], list[str]]] = []
    for op in ops:
        sources = [value.get_node().get_friendly_name() for value in op.input_values()]
        name = op.get_friendly_name()
        if all(source in fixed for source in sources):
            fixed.add(name)  # folded when the file is compiled
            continue
        view = op.get_type_name() in _VIEWS
        if view and sources[0] in given:
            given.add(name)  # the caller's memory
            continue
        outputs = op.outputs()
        if any(value.partial_shape.is_dynamic for value in outputs):
            return weights, None
        sizes[name] = sum(_bytes(value) for value in outputs)
        owner[name] = owner.get(sources[0], name) if view else name
        steps.append((sources, [name]))
    uses = Counter(owner[source] for sources, _ in steps for source in sources if source in owner)
    ends = [value.get_node().input_value(0).get_node().get_friendly_name() for value in model.outputs]
    uses.update(owner[name] for name in ends if name in owner)  # alive to the end
    return weights, peak_of(steps, sizes, owner, uses)


def _bytes(value: Any) -> int:
    count = 1
    for side in value.shape:
        count *= int(side)
    return count * value.element_type.bitwidth // 8
