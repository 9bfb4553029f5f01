"""Static int8 of other backbones: rotary embedding, SwiGLU, convolutions, registers; in both runtimes."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch

from vtk.card import Card, InputSpec, ModelSpec
from vtk_export.graph.biased_products import split_products
from vtk_export.graph.convert import choose_form, convert
from vtk_export.int8 import Recipe, prepare

_SMALL = {"depth": 1, "embed_dim": 96, "num_heads": 3}
CASES: dict[str, tuple[dict[str, Any], int, bool]] = {  # arguments, products in int8, whether norms are equalised
    "vit_small_patch16_dinov3": ({"img_size": 32, **_SMALL}, 6, True),
    "eva02_tiny_patch14_224": ({"img_size": 28, "depth": 1}, 7, True),
    "vit_giant_patch14_dinov2": ({"img_size": 28, **_SMALL}, 7, True),
    "test_convnext": ({}, 21, True),
    "test_efficientnet": ({}, 14, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_other_backbones_run_in_int8_in_both_runtimes(name: str, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    arguments, products, equalised = CASES[name]
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=7, **arguments).eval()
    for parameter in model.parameters():  # new layer scales are near 0, and all images alike
        parameter.data += 0.02 * torch.randn_like(parameter)
    side = arguments.get("img_size") or model.pretrained_cfg["input_size"][-1]
    spec = InputSpec(height=side, width=side)
    proto = convert(choose_form(model, None, vits=True), spec, opset=18)
    proto.ir_version = 10
    split_products(proto)
    before = proto.SerializeToString()
    images = torch.randn(16, 3, side, side)
    card = Card(ModelSpec(name), spec, tuple("abcdefg"))
    plan = prepare(proto, images[:8].split(1), card, Recipe(), folder=tmp_path, threads=1)
    assert proto.SerializeToString() == before

    def run(path: Path) -> np.ndarray:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        found: np.ndarray = session.run(None, {"pixel_values": images.numpy()})[0]
        return found

    for file, graph in {"exact": proto, "equal": plan.proto, "int8": plan.graph()}.items():
        onnx.save(graph, tmp_path / f"{file}.onnx")
    exact, equal, rounded = (run(tmp_path / f"{file}.onnx") for file in ("exact", "equal", "int8"))
    assert np.abs(equal - exact).max() < 1e-5 * np.abs(exact).max()
    assert bool(_names(plan.proto) - _names(proto)) == equalised
    compiled = openvino.Core().compile_model(tmp_path / "int8.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for found in (rounded, compiled(images.numpy())[0]):
        centred, wanted = found - exact.mean(0), exact - exact.mean(0)
        cosine = (centred * wanted).sum(1) / np.linalg.norm(centred, axis=1) / np.linalg.norm(wanted, axis=1)
        assert cosine.min() > 0.97
    kinds = [op.get_rt_info() for op in compiled.get_runtime_model().get_ops()]
    in_int8 = [k for k in kinds if k["layerType"].astype(str) in ("FullyConnected", "Convolution")
               and k["runtimePrecision"].astype(str) in ("u8", "i8")]  # fmt: skip
    assert len(in_int8) == products


def _names(proto: onnx.ModelProto) -> set[bytes]:
    return {tensor.SerializeToString() for tensor in proto.graph.initializer}
