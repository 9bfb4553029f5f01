"""Converts an fp32 ONNX graph to weights and arithmetic in fp16 or bf16.

Normalisations, softmax and other reductions stay in fp32, with casts around them: they add many numbers of one sign or
divide by small ones. So does every operator that the opset does not define for the type, for instance ``Conv`` in bf16
before opset 22. onnxruntime's own converter clips a weight that is too large without an error, and does not write bf16.
"""

from collections.abc import Iterable

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from vtk.errors import UsageError, VerificationError

HALF = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
"""Name on the command line to ONNX's type."""

ONNX_NAMES = {"fp32": "FLOAT", "fp16": "FLOAT16", "bf16": "BFLOAT16"}
"""The same to the name of ONNX's type."""

LARGEST = {"fp16": float(np.finfo(np.float16).max), "bf16": float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)}
"""Largest finite number of a type: 65504 for fp16."""

FP32_OPS = frozenset(
    "LayerNormalization RMSNormalization InstanceNormalization GroupNormalization BatchNormalization "
    "MeanVarianceNormalization LpNormalization LRN Softmax LogSoftmax Hardmax ReduceMean ReduceSum ReduceMax ReduceMin "
    "ReduceProd ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceSumSquare GlobalAveragePool AveragePool "
    "GlobalLpPool LpPool CumSum Einsum Exp Log Pow Sqrt Reciprocal Resize GridSample "
    # their type is an attribute, not that of an input
    "Cast Constant ConstantOfShape Range RandomNormal RandomUniform".split()
)
"""Operators that compute in fp32 whatever the type of the rest."""

_NUMPY = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def to_half(proto: onnx.ModelProto, dtype: str, *, keep_io_types: bool = False) -> dict[str, str]:
    """Convert ``proto`` in place.

    Args:
        proto: with fp32 weights inside, no control flow.
        dtype: ``fp16`` or ``bf16``.
        keep_io_types: leave inputs and outputs fp32; otherwise they take the type too.

    Returns:
        Of every value that now exists in the lower precision, the name in the fp32 graph to the node that makes it.

    Raises:
        UsageError: the graph has control flow.
        VerificationError: a weight is beyond the type's range; weight and node are named.
    """
    return _Converter(proto, dtype, keep_io_types).convert()


class _Converter:
    """One pass over the nodes in order; a cast is added the first time that a value is needed in its other type."""

    def __init__(self, proto: onnx.ModelProto, dtype: str, keep_io_types: bool) -> None:
        self.graph, self.dtype, self.keep_io = proto.graph, dtype, keep_io_types
        self.opset = next(e.version for e in proto.opset_import if e.domain in ("", "ai.onnx"))
        self.floats = float_values(proto)
        self.weights = {t.name: t for t in self.graph.initializer if t.data_type == TensorProto.FLOAT}
        self.outputs = {value.name for value in self.graph.output}
        self.nodes: list[onnx.NodeProto] = []
        self.half: dict[str, str] = {}  # name in the fp32 graph → name of the value in the lower precision
        self.wide: dict[str, str] = {}  # … in fp32
        self.makers: dict[str, str] = {}
        self.stored: dict[str, TensorProto] = {}

    def convert(self) -> dict[str, str]:
        for value in self.graph.input:
            if value.name in self.floats and value.name not in self.weights:
                (self.wide if self.keep_io else self.half)[value.name] = value.name
                self._retype(value)
        for node in self.graph.node:
            if any(a.HasField("g") or a.graphs for a in node.attribute):
                raise UsageError(f"`{node.name}` ({node.op_type}) is control flow, which --dtype {self.dtype} cannot "
                                 "convert; export in fp32")  # fmt: skip
            self._node(node)
        for value in self.graph.output:
            if value.name in self.floats:
                self._need(value.name, half=not self.keep_io)
                self._retype(value)
        kept = [t for t in self.graph.initializer if t.name not in self.weights or t.name in self.wide]
        del self.graph.node[:], self.graph.initializer[:], self.graph.value_info[:]
        self.graph.node.extend(self.nodes)
        self.graph.initializer.extend([*kept, *self.stored.values()])
        return {name: self.makers[name] for name in self.half if name in self.makers}

    def _retype(self, value: onnx.ValueInfoProto) -> None:
        if not self.keep_io:
            value.type.tensor_type.elem_type = HALF[self.dtype]

    def _node(self, node: onnx.NodeProto) -> None:
        half = self._computes_in_half(node)
        for i, name in enumerate(node.input):
            if name in self.floats:
                node.input[i] = self._need(name, half=half, maker=node)
        for i, name in enumerate(node.output):
            if name in self.floats:
                node.output[i] = self._name(name, half)
                (self.half if half else self.wide)[name] = node.output[i]
                self.makers[name] = f"{node.name or name} ({node.op_type})"
        self.nodes.append(node)

    def _computes_in_half(self, node: onnx.NodeProto) -> bool:
        if node.op_type in FP32_OPS:
            return False
        schema = onnx.defs.get_schema(node.op_type, self.opset, node.domain)
        text = f"tensor({helper.tensor_dtype_to_string(HALF[self.dtype]).removeprefix('TensorProto.').lower()})"
        names = ((schema.inputs, node.input), (schema.outputs, node.output))
        return all(
            text in formal[min(i, len(formal) - 1)].types
            for formal, actual in names
            for i, name in enumerate(actual)
            if name in self.floats
        )

    def _name(self, name: str, half: bool) -> str:
        """Return the name of a value in one type; an output of the graph keeps its name in its own type."""
        own_type = half if name not in self.outputs else half != self.keep_io
        return name if own_type else f"{name}_{self.dtype if half else 'fp32'}"

    def _need(self, name: str, *, half: bool, maker: onnx.NodeProto | None = None) -> str:
        """Return the name of ``name`` in the type asked for, cast or stored on first use."""
        have, other = (self.half, self.wide) if half else (self.wide, self.half)
        if name not in have:
            if name in self.weights:
                have[name] = self._store(name, maker) if half else name
            else:
                have[name] = self._name(name, half)
                if have[name] == other[name]:  # a graph input that keeps its type
                    have[name] = f"{name}_{self.dtype if half else 'fp32'}"
                to = HALF[self.dtype] if half else TensorProto.FLOAT
                self.nodes.append(
                    helper.make_node("Cast", [other[name]], [have[name]], to=to, name=f"cast_{have[name]}")
                )
        return have[name]

    def _store(self, name: str, node: onnx.NodeProto | None) -> str:
        array = numpy_helper.to_array(self.weights[name])
        largest = float(np.abs(array).max(initial=0))
        if not largest <= LARGEST[self.dtype]:
            place = f" of `{node.name}` ({node.op_type})" if node is not None else ""
            raise VerificationError(f"the weight `{name}`{place} reaches {largest:.4g}, {self.dtype} ends at "
                                    f"{LARGEST[self.dtype]:.6g}; {remedy(self.dtype)}")  # fmt: skip
        stored = f"{name}_{self.dtype}"
        self.stored[name] = numpy_helper.from_array(array.astype(_NUMPY[self.dtype]), stored)
        return stored


def remedy(dtype: str) -> str:
    """Return the remedy for numbers that are too large for ``dtype``."""
    return "use --dtype bf16 or fp32" if dtype == "fp16" else "use --dtype fp32"


def infer(proto: onnx.ModelProto) -> onnx.GraphProto:
    """Return a graph without large weights, on whose inputs, outputs and ``value_info`` are ONNX's types and shapes."""
    light = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import)
    light.graph.name = "types"
    light.graph.node.extend(proto.graph.node)
    light.graph.input.extend(proto.graph.input)
    light.graph.output.extend(proto.graph.output)
    light.graph.value_info.extend(proto.graph.value_info)
    for tensor in proto.graph.initializer:
        # types do not depend on large weights, and protobuf could not pass 2 GB of them to the inference
        if tensor.ByteSize() < 1024:
            light.graph.initializer.append(tensor)
        else:
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return onnx.shape_inference.infer_shapes(light, data_prop=True).graph


def float_values(proto: onnx.ModelProto) -> set[str]:
    """Return the names of all fp32 values, weights included, by ONNX's type inference."""
    inferred = infer(proto)
    values = (*inferred.input, *inferred.output, *inferred.value_info)
    found = {v.name for v in values if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    return found | {t.name for t in proto.graph.initializer if t.data_type == TensorProto.FLOAT}


def probe(proto: onnx.ModelProto, names: Iterable[str]) -> dict[str, str]:
    """Add to ``proto``, in place, an output with the largest absolute number of each value of ``names``.

    Returns:
        Name of a value to the name of its new output.
    """
    added = {}
    for i, name in enumerate(names):
        added[name] = f"largest_{i}"
        proto.graph.node.append(helper.make_node("Abs", [name], [f"absolute_{i}"]))
        proto.graph.node.append(helper.make_node("ReduceMax", [f"absolute_{i}"], [added[name]], keepdims=0))
        proto.graph.output.append(helper.make_tensor_value_info(added[name], TensorProto.FLOAT, []))
    return added
