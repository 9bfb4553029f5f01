"""An antialiased Resize of an ONNX file is the same in OpenVINO as in ONNX Runtime."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from vtk.runtime.openvino_runtime import compile_file

pytest.importorskip("openvino")

SIZES = ((4, 5, 4, 5), (40, 60, 7, 11), (9, 9, 20, 13), (5, 30, 8, 4))


@pytest.mark.parametrize("mode", ["cubic", "linear"])
@pytest.mark.parametrize("kind", [np.uint8, np.float32], ids=["uint8", "fp32"])
def test_images_that_shrink_and_grow(mode: str, kind: Any, tmp_path: Path) -> None:
    number = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    images = helper.make_tensor_value_info("images", number, ["batch", 3, "height", "width"])
    target = helper.make_tensor_value_info("size", TensorProto.INT64, [4])
    out = helper.make_tensor_value_info("resized", number, ["batch", 3, "down", "across"])
    resize = helper.make_node(
        "Resize", ["images", "", "", "size"], ["resized"], mode=mode, antialias=1, exclude_outside=1,
        cubic_coeff_a=-0.5, coordinate_transformation_mode="half_pixel",
    )  # fmt: skip
    graph = helper.make_graph([resize], "resize", [images, target], [out])
    path = tmp_path / "resize.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    compiled = compile_file(path, precision="fp32", threads=1, cache=False)
    rng = np.random.default_rng(0)
    for height, width, down, across in SIZES:
        feeds = {"images": rng.integers(0, 256, (2, 3, height, width)).astype(kind),
                 "size": np.array([2, 3, down, across], np.int64)}  # fmt: skip
        want, got = session.run(None, feeds)[0].astype(float), compiled(feeds)[0].astype(float)
        # fp32: of 255; uint8: values half between two levels
        assert np.abs(got - want).max() <= (0.01 if kind is np.float32 else 1), (height, width)
