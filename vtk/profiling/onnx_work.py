"""Counts the FLOPs and bytes of an ONNX file for one image, from its graph."""

import math
from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import ModelProto, NodeProto

from vtk.profiling.work import Work
from vtk.readers import reading
from vtk.runtime.onnx_file import load_proto

_PRODUCTS = ("MatMul", "Gemm", "Conv", "MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv")


def work_of_onnx(path: Path, shape: tuple[int, ...] | None = None) -> Work | None:
    """Count products and convolutions, two FLOPs per multiply-add, and the numbers in weights, image and logits.

    Args:
        path: of the file.
        shape: (C, H, W) that the model takes, for a file that brings images of any size to it; its resizing, in which
            nothing is multiplied with weights, is left out.

    Returns:
        None where shapes cannot be inferred, or an operator of another domain may hide products.
    """
    proto = load_proto(path)
    with reading(path, "is a graph that is wrong in itself"):
        return _count(proto, shape)


def _count(proto: ModelProto, shape: tuple[int, ...] | None) -> Work | None:
    if shape is not None:
        _drop_preprocessing(proto, shape)
    weights = {tensor.name: list(tensor.dims) for tensor in proto.graph.initializer}
    parameters = sum(math.prod(dims) for dims in weights.values())
    light = without_data(proto)
    try:
        inferred = onnx.shape_inference.infer_shapes(light, data_prop=True).graph
    except (onnx.shape_inference.InferenceError, ValueError):
        return None
    shapes = dict(weights)
    for value in (*inferred.value_info, *inferred.input, *inferred.output):
        dims = value.type.tensor_type.shape.dim
        # the batch is the only axis without a number
        shapes.setdefault(value.name, [d.dim_value or 1 for d in dims])
    total = 0
    for node in proto.graph.node:
        if node.domain not in ("", "ai.onnx") or any(a.HasField("g") for a in node.attribute):
            return None
        if node.op_type in _PRODUCTS:
            flops = _flops(node, shapes)
            if flops is None:
                return None
            total += flops
    ends = [value.name for value in (*proto.graph.input, *proto.graph.output) if value.name not in weights]
    return Work(total, parameters, sum(math.prod(shapes[name]) for name in ends))


def _flops(node: NodeProto, shapes: dict[str, list[int]]) -> int | None:
    """Return 2 × elements of the output × length of each sum."""
    weight = node.input[3] if node.op_type.startswith("QLinear") else node.input[1]
    first = shapes.get(node.input[0])
    other, output = shapes.get(weight), shapes.get(node.output[0])
    if not first or not other or not output:
        return None
    if "Conv" in node.op_type:
        length = math.prod(other[1:])  # input channels of a group, and the kernel's sides
    elif node.op_type == "Gemm":
        transposed = any(a.name == "transA" and a.i for a in node.attribute)
        length = first[0] if transposed else first[1]
    else:
        length = first[-1]
    return 2 * math.prod(output) * length


def _drop_preprocessing(proto: ModelProto, shape: tuple[int, ...]) -> None:
    """Let the graph begin where images have the model's size, if it prepares them itself."""
    nodes = list(proto.graph.node)
    prepares = [i for i, node in enumerate(nodes) if node.name.startswith("preprocess_")]
    prepares = prepares or [i for i, node in enumerate(nodes) if "pixel_values" in node.output]
    if not prepares:
        return
    source = prepares[-1]
    name = proto.graph.node[source].output[0]
    last = {a.name: a.i for a in proto.graph.node[source].attribute}
    kind = last.get("to", onnx.TensorProto.FLOAT)  # a file in half precision rounds them at last
    rest = list(proto.graph.node)[source + 1 :]  # the nodes before are those that prepare images
    del proto.graph.node[:], proto.graph.input[:]
    proto.graph.node.extend(rest)
    proto.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, ["batch", *shape]))
    used = {name for node in rest for name in node.input}
    weights = [tensor for tensor in proto.graph.initializer if tensor.name in used]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(weights)


def without_data(proto: ModelProto, shapes: Mapping[str, tuple[int, ...]] | None = None) -> ModelProto:
    """Return a copy whose large weights are inputs: inference needs shapes, not values.

    Args:
        proto: the model.
        shapes: of its inputs; a batch of one where there are none.
    """
    light = ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import)
    light.graph.name = "shapes"
    light.graph.node.extend(proto.graph.node)
    light.graph.output.extend(proto.graph.output)
    light.graph.input.extend(proto.graph.input)
    for value in (*light.graph.input, *light.graph.output):
        dims = value.type.tensor_type.shape.dim
        if shapes is not None and value.name in shapes:
            for dim, size in zip(dims, shapes[value.name], strict=False):
                dim.ClearField("dim_param")
                dim.dim_value = size
        elif dims and not dims[0].HasField("dim_value"):
            dims[0].ClearField("dim_param")
            dims[0].dim_value = 1
    known = {value.name for value in light.graph.input}
    for tensor in proto.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL and tensor.ByteSize() < 4096:
            light.graph.initializer.append(tensor)
        elif tensor.name not in known:
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            light.graph.input.append(info)
    return light
