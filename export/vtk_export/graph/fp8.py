"""Quantises the wide products of an fp32 ONNX graph to e4m3, in the form that TensorRT's matcher takes.

Before each product of tokens with a weight, the tokens pass QuantizeLinear and DequantizeLinear with one calibrated
scale; the weight is stored in e4m3 with one scale per output channel, behind a DequantizeLinear. NVIDIA's pages on
explicit quantisation ask for that ("pre-quantized weights", one scale or a vector of them along an axis). Products that
share their tokens share the pair. The classifier, attention's own products and the projection behind it are left as
they are, as in `vtk.fused.fp8`.

The relative precision of e4m3 does not depend on the magnitude, so a scale may be too large by 2: values twice as large
as any in calibration still fit, at the cost of one of fifteen powers of two at the low end.
"""

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from vtk.errors import VerificationError
from vtk_export.graph.precision import infer

LARGEST = 448.0
HEADROOM = 2.0
"""Of a scale over the largest value that calibration saw."""

LEAST_OPSET, LEAST_IR = 19, 9
"""That have e4m3."""

_LEAST_SCALE = float(np.finfo(np.float16).smallest_normal)
"""Scales are fp16 numbers later, exactly: powers of two for tokens, and none that fp16 cannot hold in full."""

_PASSED = ("Reshape", "Transpose", "Cast", "Identity", "Squeeze", "Unsqueeze")


def wide_products(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Return the products of tokens with a weight that are to read e4m3."""
    graph = proto.graph
    weights = {tensor.name for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    inferred = infer(proto)
    ranks = {value.name: len(value.type.tensor_type.shape.dim)
             for value in (*inferred.value_info, *inferred.input, *inferred.output)}  # fmt: skip
    found = []
    for node in graph.node:
        if node.op_type != "MatMul" or node.input[1] not in weights or node.input[0] in weights:
            continue
        if ranks.get(node.input[0]) == 3 and not _is_attention(node.input[0], makers, weights):
            found.append(node)
    return found


def _is_attention(name: str, makers: Mapping[str, onnx.NodeProto], weights: set[str]) -> bool:
    """Return whether a value is a product of two activations, up to its shape."""
    while (node := makers.get(name)) is not None and node.op_type in _PASSED:
        name = node.input[0]
    return node is not None and node.op_type == "MatMul" and not weights.intersection(node.input)


def quantize_fp8(proto: onnx.ModelProto, largest: Mapping[str, float]) -> int:
    """Quantise the inputs of the wide products to e4m3, in place.

    Args:
        proto: fp32, of opset 19 or later.
        largest: the largest absolute number of each value that a wide product reads, over the calibration's images.

    Returns:
        How many products read e4m3.

    Raises:
        VerificationError: one of these numbers is NaN or infinite, or there is no such product.
    """
    graph, products = proto.graph, wide_products(proto)
    if not products:
        raise VerificationError(
            "the graph has no product of tokens with a weight that could be in fp8; use --dtype fp16"
        )
    stored = {tensor.name: tensor for tensor in graph.initializer}
    quantizers: dict[str, list[onnx.NodeProto]] = {}
    added: dict[str, TensorProto] = {"fp8_zero": _e4m3(np.zeros((), np.float32), "fp8_zero")}
    for node in products:
        tokens, weight = node.input
        if tokens not in quantizers:
            quantizers[tokens] = _pair(tokens, largest[tokens], added)
        node.input[0] = f"{tokens}_fp8_read"
        if f"{weight}_fp8" not in added:
            quantizers[weight] = [_weight(stored[weight], added)]
        node.input[1] = f"{weight}_fp8_read"
    kept = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    tensors = [tensor for tensor in graph.initializer if tensor.name in kept]
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for name in node.input:  # before the first product that reads them
            nodes += quantizers.pop(name.removesuffix("_fp8_read"), []) if name.endswith("_fp8_read") else []
        nodes.append(node)
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend([*tensors, *added.values()])
    return len(products)


def _pair(tokens: str, largest: float, added: dict[str, TensorProto]) -> list[onnx.NodeProto]:
    """Return the two nodes that round tokens to e4m3."""
    if not np.isfinite(largest):
        raise VerificationError(f"an image of the calibration makes `{tokens}` NaN or infinite; leave it out of --data")
    scale = max(HEADROOM * largest / LARGEST, _LEAST_SCALE)
    name = f"{tokens}_fp8_scale"
    added[name] = numpy_helper.from_array(np.array(2.0 ** np.ceil(np.log2(scale)), np.float32), name)
    ends = [name, "fp8_zero"]
    return [
        helper.make_node("QuantizeLinear", [tokens, *ends], [f"{tokens}_fp8"], name=f"{tokens}_fp8"),
        helper.make_node("DequantizeLinear", [f"{tokens}_fp8", *ends], [f"{tokens}_fp8_read"],
                         name=f"{tokens}_fp8_read"),
    ]  # fmt: skip


def _weight(tensor: TensorProto, added: dict[str, TensorProto]) -> onnx.NodeProto:
    """Store a weight (K, F) in e4m3, and return the node that dequantises it."""
    w, name = numpy_helper.to_array(tensor).astype(np.float32), tensor.name
    # rounded up to fp16, so that no code is beyond the largest number
    scale = np.maximum(np.abs(w).max(0) / LARGEST * (1 + 2.0**-10), _LEAST_SCALE).astype(np.float16).astype(np.float32)
    added[f"{name}_fp8"] = _e4m3(w / scale, f"{name}_fp8")
    added[f"{name}_fp8_scale"] = numpy_helper.from_array(scale, f"{name}_fp8_scale")
    added[f"{name}_fp8_zero"] = _e4m3(np.zeros(len(scale), np.float32), f"{name}_fp8_zero")
    inputs = [f"{name}_fp8", f"{name}_fp8_scale", f"{name}_fp8_zero"]
    return helper.make_node("DequantizeLinear", inputs, [f"{name}_fp8_read"], name=f"{name}_fp8_read", axis=1)


def _e4m3(values: np.ndarray, name: str) -> TensorProto:
    codes = values.astype(ml_dtypes.float8_e4m3fn)
    return helper.make_tensor(name, TensorProto.FLOAT8E4M3FN, values.shape, codes.tobytes(), raw=True)
