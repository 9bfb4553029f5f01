"""Lets OpenVINO resize as an ONNX file of ours says: its converter reads an antialiased Resize as a plain one.

What comes of ``antialias`` and ``exclude_outside`` is an Interpolate whose filter has one width, whatever the scale,
and which takes pixels beyond the border for copies of the last. OpenVINO's copies of Pillow's filters are right.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from openvino import Model

_FILTERS = {"cubic": "bicubic_pillow", "linear": "bilinear_pillow", "linear_onnx": "bilinear_pillow"}


def antialias(model: "Model") -> int:
    """Replace the antialiased Interpolates of images (batch, channels, height, width), in place; return how many."""
    import openvino.opset13 as op
    from openvino.utils import replace_node

    count = 0
    for node in model.get_ordered_ops():
        known: Any = node.get_attributes() if node.get_type_name() == "Interpolate" else {}
        mode = _FILTERS.get(known.get("mode", "")) if known.get("antialias") else None
        if mode is None or known["shape_calculation_mode"] != "sizes":
            continue
        images = node.input_value(0)
        if images.get_partial_shape().rank.is_dynamic or len(images.get_partial_shape()) != 4:
            continue
        sides = np.array([2, 3], np.int64)
        sizes = op.gather(node.input_value(1), op.constant(sides), op.constant(np.int64(0)))
        new = op.interpolate(images, sizes, mode, "sizes", axes=sides, cube_coeff=known["cube_coeff"])
        new.friendly_name = node.friendly_name
        replace_node(node, new)
        count += 1
    return count
