"""An ONNX file written by hand, so that the back-ends are checked against arithmetic and not against an exporter."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vtk.card import Card, InputSpec, ModelSpec

CLASSES = ("blue", "green", "red")


@pytest.fixture
def card() -> Card:
    return Card(ModelSpec("by-hand"), InputSpec(4, 6, mean=(0.0,) * 3, std=(1.0,) * 3), CLASSES)


@pytest.fixture
def weight() -> np.ndarray:
    """(72, 3): logits are the flattened image times this."""
    return np.random.default_rng(0).normal(size=(72, 3)).astype(np.float32)


@pytest.fixture
def write_onnx(tmp_path: Path, weight: np.ndarray) -> Callable[..., Path]:
    """Write pixel_values (batch, 3, 4, 6) → Flatten → MatMul → logits (batch, 3)."""

    def write(
        name: str = "model.onnx", *, card: Card | None = None, batch: str | int = "batch", output: str = "logits"
    ) -> Path:
        flatten = helper.make_node("Flatten", ["pixel_values"], ["flat"])
        nodes = [flatten, helper.make_node("MatMul", ["flat", "w"], [output])]
        graph = helper.make_graph(
            nodes,
            "by-hand",
            [helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, [batch, 3, 4, 6])],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, [batch, 3])],
            [numpy_helper.from_array(weight, "w")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        if card is not None:
            helper.set_model_props(model, {"vtk": card.to_json()})
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        onnx.save(model, path)
        return path

    return write
