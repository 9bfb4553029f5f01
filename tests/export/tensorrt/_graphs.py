"""Graphs made by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def make_graph(
    nodes: Sequence[onnx.NodeProto],
    *,
    inputs: dict[str, tuple[int, Sequence[Any]]],
    weights: dict[str, np.ndarray] | None = None,
    opset: int = 18,
    more: dict[str, int] | None = None,
) -> onnx.ModelProto:
    """A model whose outputs are those of the last node."""
    graph = helper.make_graph(
        list(nodes), "graph",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in nodes[-1].output],
        [numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid(domain, version) for domain, version in {"": opset, **(more or {})}.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


IMAGE = {"pixel_values": (TensorProto.FLOAT, ["batch", 3, 32, 48])}


def make_attention(
    dtype: int = TensorProto.FLOAT16,
    *,
    packed: bool = False,
    scale: Sequence[str] = ("q",),
    maximum: bool = False,
    casts: bool = True,
    head: int = 16,
    axis: int = -1,
    mask: bool = False,
) -> onnx.ModelProto:
    """Attention of two heads over four tokens, in the form that is fused, or with one thing changed.

    Args:
        dtype: of the products.
        packed: q, k and v cut out of one product.
        scale: where it is: ``q``, ``k``, both, or ``scores``.
        maximum: taken off before Softmax.
        casts: Softmax in fp32.
        head: channels of a head.
        axis: of Softmax.
        mask: added to the scores.
    """
    width, number = 2 * head, helper.tensor_dtype_to_np_dtype(dtype)
    weights: dict[str, np.ndarray] = {
        "shape": np.array([0, 4, 2, head]), "back": np.array([0, 4, width]), "last": np.array([-1]),
        "half": np.array(0.5, number), "mask": np.zeros((4, 4), number), "two": np.array([2]),
    }  # fmt: skip
    nodes = []

    def add(op: str, inputs: list[str], output: str, **more: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [output], name=f"make_{output}", **more))
        return output

    if packed:
        weights |= {"w": np.ones((width, 3 * width), number), "many": np.array([0, 4, 3, 2, head])}
        add("Transpose", [add("Reshape", [add("MatMul", ["x", "w"], "wide"), "many"], "five")], "parts",
            perm=[2, 0, 3, 1, 4])  # fmt: skip
    heads = {}
    for i, name in enumerate("qkv"):
        if packed:
            weights[f"index_{name}"] = np.array(i)
            value = add("Gather", ["parts", f"index_{name}"], f"heads_{name}", axis=0)
        else:
            weights |= {f"w_{name}": np.full((width, width), i + 1, number), f"b_{name}": np.ones(width, number)}
            value = add("Add", [add("MatMul", ["x", f"w_{name}"], f"product_{name}"), f"b_{name}"], f"full_{name}")
            value = add("Transpose", [add("Reshape", [value, "shape"], f"split_{name}")], f"heads_{name}",
                        perm=[0, 2, 1, 3])  # fmt: skip
        if name == "k":
            value = add("Transpose", [value], "turned_k", perm=[0, 1, 3, 2])
        heads[name] = add("Mul", [value, "half"], f"scaled_{name}") if name in scale else value
    scores = add("MatMul", [heads["q"], heads["k"]], "scores")
    if "scores" in scale:
        scores = add("Mul", [scores, "half"], "scaled_scores")
    if mask:
        scores = add("Add", [scores, "mask"], "masked")
    if maximum:
        scores = add("Sub", [scores, add("ReduceMax", [scores, "last"], "highest")], "lowered")
    scores = add("Cast", [scores], "wide_scores", to=TensorProto.FLOAT) if casts else scores
    share = add("Softmax", [scores], "share", axis=axis)
    share = add("Cast", [share], "narrow_share", to=dtype) if casts else share
    add("MatMul", [share, heads["v"]], "mixed")
    add("Reshape", [add("Transpose", ["mixed"], "rows", perm=[0, 2, 1, 3]), "back"], "y")
    return make_graph(nodes, inputs={"x": (dtype, ["batch", 4, width])}, weights=weights)
