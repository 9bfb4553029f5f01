"""Small graphs with the products of a block, written by hand, and their card."""

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from vtk.card import Card, InputSpec, ModelSpec

SIZE, WIDTH, HIDDEN, CLASSES = 4, 8, 16, 5


def card() -> Card:
    """The card of every graph here."""
    spec = ModelSpec("vit_tiny_patch16_224")
    return Card(spec, InputSpec(height=SIZE, width=SIZE), tuple("abcde"))


def block(seed: int = 0, *, gated: bool = False, outlier: float = 20.0) -> onnx.ModelProto:
    """A patch product, a norm with one large channel, two products of it, GELU or a gate, a product, a classifier."""
    rng = np.random.default_rng(seed)
    values: dict[str, np.ndarray] = {
        "patch": rng.normal(size=(48, WIDTH)) / 7, "gain": np.ones(WIDTH), "shift": rng.normal(size=WIDTH),
        "up": rng.normal(size=(WIDTH, HIDDEN)) / 3, "up_bias": rng.normal(size=HIDDEN) / 3,
        "side": rng.normal(size=(WIDTH, HIDDEN)) / 3, "side_bias": rng.normal(size=HIDDEN) / 3,
        "down": rng.normal(size=(HIDDEN, WIDTH)) / 4, "down_bias": rng.normal(size=WIDTH) / 4,
        "last": rng.normal(size=(WIDTH, CLASSES)), "last_bias": rng.normal(size=CLASSES),
    }  # fmt: skip
    # large, and of no more effect than the others: as in trained models
    values["gain"][1], values["shift"][1] = outlier, outlier
    for name in ("up", "side"):
        values[name][1] /= outlier
    node = helper.make_node
    nodes = [
        node("Flatten", ["pixel_values"], ["flat"], axis=1),
        node("Unsqueeze", ["flat", "axis"], ["row"]),
        node("MatMul", ["row", "patch"], ["token"]),
        node("LayerNormalization", ["token", "gain", "shift"], ["norm"], axis=-1, epsilon=1e-6),
        node("MatMul", ["norm", "up"], ["up_product"]),
        node("Add", ["up_product", "up_bias"], ["gate"]),
        node("MatMul", ["norm", "side"], ["side_product"]),
        node("Add", ["side_product", "side_bias"], ["value"]),
        node("Sigmoid", ["gate"], ["gated"]),
        node("Mul" if gated else "Add", ["gated", "value"], ["hidden"]),
        node("MatMul", ["hidden", "down"], ["down_product"]),
        node("Add", ["down_product", "down_bias"], ["out"]),
        node("Flatten", ["out"], ["pooled"], axis=1),
        node("Gemm", ["pooled", "last", "last_bias"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes, "block",
        [helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["batch", 3, SIZE, SIZE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(v.astype(np.float32), k) for k, v in values.items()]
        + [numpy_helper.from_array(np.array([1], np.int64), "axis")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def batches(count: int, seed: int = 1) -> list[Tensor]:
    """Images one by one, (1, 3, 4, 4)."""
    noise = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, 3, SIZE, SIZE, generator=noise).split(1))
