"""Lowers an opset-18 graph to opset 17, for TensorRT 8.6, and refuses operators that opset 17 cannot express.

ONNX's own version converter knows few downward steps and skips nodes that it does not know.
"""

import onnx
from onnx import helper, numpy_helper

from vtk.errors import UsageError

OPSET = 17
"""Highest opset of TensorRT 8.6 (docs/operators.md of onnx/onnx-tensorrt 8.5)."""


def lower(proto: onnx.ModelProto, *, ir_version: int) -> None:
    """Rewrite ``proto`` in place as opset 17.

    Args:
        proto: of a newer opset; weights may be kept beside the file.
        ir_version: to stamp it with.

    Raises:
        UsageError: an operator has a newer meaning that 17 cannot express; the node is named.
    """
    (entry,) = (e for e in proto.opset_import if e.domain in ("", "ai.onnx"))
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        if _since(node, OPSET) != _since(node, entry.version) and not _rewrite(node, constants):
            raise UsageError(f"TensorRT 8.6 takes opset {OPSET}, which cannot express `{node.name}` ({node.op_type} of "
                             f"opset {entry.version}); give --trt 10.x (--target trt:10.x)")  # fmt: skip
    entry.version = OPSET
    proto.ir_version = ir_version


def _since(node: onnx.NodeProto, opset: int) -> int:
    """Return the opset that last changed an operator up to ``opset``; 0 if ``opset`` lacks it."""
    try:
        return int(onnx.defs.get_schema(node.op_type, opset, node.domain).since_version)
    except onnx.defs.SchemaError:
        return 0


def _rewrite(node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]) -> bool:
    """Rewrite a node in opset 17, in place; return False if that is not possible."""
    if node.op_type.startswith("Reduce"):
        # axes became an input in 18 (ReduceSum had that before, so its versions do not differ)
        if len(node.input) < 2 or node.input[1] not in constants:
            return False
        axes = numpy_helper.to_array(constants[node.input[1]])
        kept = [entry for entry in node.attribute if entry.name != "noop_with_empty_axes"]
        del node.input[1:], node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute("axes", [int(axis) for axis in axes])])
        return axes.size > 0
    if node.op_type == "Split":
        # without sizes, 17 makes as many equal parts as there are outputs, and is refused when run where 18 would make
        # the last one smaller
        kept = [entry for entry in node.attribute if entry.name != "num_outputs"]
        del node.attribute[:]
        node.attribute.extend(kept)
        return True
    return node.op_type == "Pad" and len(node.input) < 4  # 18 added axes
