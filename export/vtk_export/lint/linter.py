"""Reports what TensorRT's ONNX parser would refuse in a file, and which fused kernels it would miss.

For any ONNX file. It checks what is documented (`vtk_export.lint.operators` lists the sources), not what a build on a
device would show.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

from vtk.errors import DataError, VerificationError
from vtk.readers import reading
from vtk.runtime.onnx_file import load_proto
from vtk_export.lint.attention_matcher import attention
from vtk_export.lint.finding import REFUSED, Finding
from vtk_export.lint.fp8_matcher import fp8
from vtk_export.lint.graph_view import View, attribute, subgraphs, type_name
from vtk_export.lint.operators import SINCE, operators
from vtk_export.targets import Target

_RESIZE_MODES = ("nearest", "linear")
_FIRST_OUTPUT_ONLY = ("LayerNormalization", "MaxPool", "Dropout")
_REMEDIES = {
    "DynamicQuantizeLinear": "quantise with ranges that are fixed beforehand (--int8 static of the ONNX exporter)",
    "MatMulInteger": "write Q/DQ pairs around MatMul in place of integer operators",
    "ConvInteger": "write Q/DQ pairs around Conv in place of integer operators",
    "QLinearMatMul": "write Q/DQ pairs around MatMul in place of integer operators",
    "QLinearConv": "write Q/DQ pairs around Conv in place of integer operators",
    "Gelu": "write GELU with Erf, or export with opset 18",
    "RMSNormalization": "write the norm with ReduceMean, Sqrt and Mul, or build with 10.15",
    "Attention": "write two MatMuls with Softmax between, or build with 10.14",
}


def load(path: Path) -> onnx.ModelProto:
    """Read a file without its external weights.

    Raises:
        DataError: it is not there, or no ONNX file.
    """
    proto: onnx.ModelProto = load_proto(path)
    if not proto.graph.node:
        raise DataError(f"{path} has no graph; was it cut short?")
    return proto


def lint(proto: onnx.ModelProto, target: Target) -> list[Finding]:
    """Return all findings, those that stop the parser first.

    Args:
        proto: any ONNX model; not changed.
        target: of `vtk_export.tensorrt.config.parse_version`.

    Raises:
        DataError: the types in the graph contradict each other.
    """
    with reading("the graph", "is not valid ONNX", "was the file damaged?"):
        view = View(proto)
        found = [*_file(proto, target), *_nodes(view, view.graph, target), *attention(view, target), *fp8(view)]
    return sorted(found, key=lambda finding: finding.level != REFUSED)


def check(proto: onnx.ModelProto, target: Target) -> list[Finding]:
    """Return the slow findings; raise for a refused one.

    Raises:
        VerificationError: names the first node that does, and how many others.
    """
    found = lint(proto, target)
    refused = [finding for finding in found if finding.level == REFUSED]
    if refused:
        others = f" ({len(refused) - 1} more; `vtk export tensorrt FILE.onnx --lint` shows them)" * (len(refused) > 1)
        raise VerificationError(f"TensorRT {target.version} cannot take the graph: {refused[0].line()}{others}")
    return found


def _file(proto: onnx.ModelProto, target: Target) -> Iterator[Finding]:
    opset = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if not 9 <= opset <= target.opset:
        yield Finding("model", "opset", str(opset), f"is an opset that TensorRT {target.version} does not support",
                      f"export with an opset of 9 to {target.opset}")  # fmt: skip
    if proto.ir_version > target.ir_version:
        yield Finding("model", "IR", str(proto.ir_version), f"is newer than TensorRT {target.version} supports",
                      f"write IR version {target.ir_version}")  # fmt: skip
    for function in proto.functions:
        yield Finding(function.name, "function", "unknown type", "is a function defined in the file",
                      "inline it with onnx.inliner.inline_local_functions")  # fmt: skip


def _nodes(view: View, graph: onnx.GraphProto, target: Target) -> Iterator[Finding]:
    table = operators(_numbers(target))
    for node in graph.node:
        about = _About(view, node)
        if node.domain not in ("", "ai.onnx"):
            yield about(f"is in the domain {node.domain}, which needs a TensorRT plugin",
                        "export with standard operators only, without fusions for another runtime")  # fmt: skip
        elif node.op_type not in table:
            since = SINCE.get(node.op_type)
            known = since and target.version != "8.6"
            text = f"came with TensorRT {since[0]}.{since[1]}" if since and known else "is not supported by its parser"
            yield about(text, _REMEDIES.get(node.op_type, "replace it in the model, or leave that part out"))
        else:
            yield from _types(view, node, table[node.op_type], about, target)
            yield from _details(view, node, about)
        for inner in subgraphs(node):
            yield from _nodes(view, inner, target)


class _About:
    """Makes findings of one node."""

    def __init__(self, view: View, node: onnx.NodeProto) -> None:
        self.name = node.name or next((name for name in node.output if name), "unnamed")
        self.op, self.dtype = node.op_type, type_name(view.dtype(node))

    def __call__(self, problem: str, remedy: str, dtype: int = 0) -> Finding:
        return Finding(self.name, self.op, type_name(dtype) if dtype else self.dtype, problem, remedy)


def _types(
    view: View, node: onnx.NodeProto, allowed: frozenset[int], about: _About, target: Target
) -> Iterator[Finding]:
    # a type that inference does not know (in control flow) is left to the parser
    for dtype in filter(None, dict.fromkeys((view.dtype(node), _cast_to(node)))):
        if dtype not in allowed:
            names = ", ".join(type_name(number) for number in sorted(allowed))
            yield about(f"does not support {type_name(dtype)} in TensorRT {target.version}, only {names}",
                        "cast to one of them", dtype)  # fmt: skip


def _cast_to(node: onnx.NodeProto) -> int:
    to = attribute(node, "to", 0) if node.op_type == "Cast" else 0
    return to if isinstance(to, int) else 0


def _details(view: View, node: onnx.NodeProto, about: _About) -> Iterator[Finding]:
    op = node.op_type
    if op in ("Slice", "Reshape"):
        for i, what in enumerate(("starts", "ends", "axes", "steps") if op == "Slice" else ("shape",), 1):
            if i < len(node.input) and node.input[i] and not _constant(view, node.input[i]):
                yield about(f"has `{what}` computed in the graph",
                            "make them constants: export the fused form, or a fixed batch size")  # fmt: skip
    axes = {"Squeeze": 1, "Unsqueeze": 1}.get(op, 1 if op.startswith("Reduce") else 0)
    if axes and len(node.input) > axes and node.input[axes] and not _constant(view, node.input[axes]):
        yield about("has `axes` computed in the graph", "make them constants")
    if op in _FIRST_OUTPUT_ONLY and any(name and view.readers.get(name) for name in node.output[1:]):
        yield about("has a second output that is read", "use its first output only")
    if op in ("QuantizeLinear", "DequantizeLinear") and len(node.input) > 2 and node.input[2]:
        zero = view.number(node.input[2])
        if zero is None or np.asarray(zero, np.float32).any():
            yield about("has a non-zero zero point", "quantise symmetrically, to signed int8 or e4m3")
    if op == "Resize":
        yield from _resize(node, about)
    if op == "Sub" and _is_mean_of(view, node.input[1], node.input[0]):
        yield about("starts a norm written in single operators: less precise in half types, and not one kernel",
                    "export LayerNormalization as one node, with opset 17 or newer")  # fmt: skip


def _resize(node: onnx.NodeProto, about: _About) -> Iterator[Finding]:
    mode = attribute(node, "mode", "nearest")
    if mode not in _RESIZE_MODES:
        yield about(f"resizes with mode {mode}", f"use {' or '.join(_RESIZE_MODES)}, or resize beforehand")
    if attribute(node, "antialias", 0):
        yield about("resizes with antialiasing", "resize images before they are given to the engine")


def _constant(view: View, name: str) -> bool:
    """Return whether a value is known when the engine is built: a weight, or made of weights alone."""
    if name in view.weights:
        return True
    node = view.makers.get(name)
    return node is not None and bool(node.input) and all(_constant(view, entry) for entry in node.input if entry)


def _is_mean_of(view: View, mean: str, of: str) -> bool:
    node = view.makers.get(mean)
    return node is not None and node.op_type == "ReduceMean" and node.input[0] == of


def _numbers(target: Target) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", target.version)[:2]
    return int(major), int(minor)
