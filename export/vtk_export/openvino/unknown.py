"""Appends the output ``unknown`` to an OpenVINO model, as `vtk_export.graph.unknown` does to an ONNX graph."""

from typing import TYPE_CHECKING

import numpy as np

from vtk.card import Card

if TYPE_CHECKING:
    from openvino import Model


def append(model: "Model", card: Card, *, answer: str, shares: bool, name: str) -> None:
    """Add the output ``name`` (batch,), bool: largest of softmax(logits / temperature) < threshold, or NaN. In place.

    Args:
        model: with the output ``answer``, logits or their softmax.
        card: with a threshold.
        answer: name of that output.
        shares: whether it is the softmax; its last node does not say, which in int8 hands NaN on.
        name: of the new one.
    """
    from openvino import opset13 as op

    assert card.threshold is not None
    value = model.output(answer).get_node().input_value(0)
    if not shares:
        if card.temperature != 1:
            value = op.multiply(value, np.float32(1 / card.temperature)).output(0)
        value = op.softmax(value, -1).output(0)
    score = op.reduce_max(value, np.array([-1], np.int64), keep_dims=False)
    unknown = op.logical_or(op.is_nan(score), op.less(score, np.float32(card.threshold.score)))
    unknown.set_friendly_name(name)
    (added,) = model.add_outputs([unknown.output(0)])
    added.get_tensor().set_names({name})
