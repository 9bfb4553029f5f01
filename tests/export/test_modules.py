"""Export of modules in memory, and what then runs the files, against the module itself in fp64."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
import torchvision
from PIL import Image
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.evaluation.config import EvalConfig, PredictConfig
from vtk.runtime.backends.base import load_backend
from vtk.runtime.evaluation import evaluate_source
from vtk.runtime.opening import open_source
from vtk.runtime.prediction import predict_images
from vtk_export.aoti.config import AotiConfig
from vtk_export.aoti.export import export_aoti
from vtk_export.onnx.config import OnnxConfig
from vtk_export.onnx.export import export_onnx
from vtk_export.tensorrt.config import TensorrtConfig
from vtk_export.tensorrt.export import export_tensorrt

CLASSES = ("blue", "green", "red")


def resnet() -> nn.Module:
    torch.manual_seed(5)
    block = torchvision.models.resnet.BasicBlock
    module = torchvision.models.ResNet(block, [1, 1, 1, 1], num_classes=3)
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.running_mean, -0.1, 0.1)
    return module


def small() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(4 * 7 * 5, 3))


def exact(module: nn.Module, images: Tensor) -> np.ndarray:
    with torch.no_grad():
        return copy.deepcopy(module).double().eval()(images.double()).numpy()


@pytest.fixture
def mean_colour() -> nn.Module:
    """Logits: how blue, green and red an image is."""
    module = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3, bias=False))
    with torch.no_grad():
        module[2].weight.copy_(10 * torch.eye(3).flip(0))
    return module


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name, channel in zip(CLASSES, (2, 1, 0), strict=True):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(2):
            pixels = rng.integers(0, 100, (20, 30, 3), dtype=np.uint8)
            pixels[..., channel] += 120
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path / "photos"


@pytest.mark.parametrize(("make", "shape"), [(resnet, (3, 32, 48)), (small, (1, 16, 12))], ids=["torchvision", "plain"])
def test_onnx_of_a_module_that_is_not_timms(make: Any, shape: tuple[int, int, int], tmp_path: Path) -> None:
    module = make()
    source = open_source(module, img_size=shape[1:], classes=CLASSES)
    result = export_onnx(source, OnnxConfig(out=tmp_path / "out"), show=False)
    session = onnxruntime.InferenceSession(result.path, providers=["CPUExecutionProvider"])
    images = torch.randn(3, *shape)
    got, want = session.run(["logits"], {"pixel_values": images.numpy()})[0], exact(module, images)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
    again = open_source(result.path)
    assert again.card.classes == CLASSES and again.described
    assert again.card.input == source.card.input
    assert module.training, "the caller's module was put into eval mode"


def test_tensorrt_files_of_a_module(tmp_path: Path) -> None:
    module = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3, depth=1, embed_dim=32, num_heads=2)
    result = export_tensorrt(open_source(module), TensorrtConfig(out=tmp_path / "out"), show=False)
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    images, fused = torch.randn(2, 3, 32, 32), [m.fused_attn for m in module.modules() if hasattr(m, "fused_attn")]
    got, want = session.run(["logits"], {"pixel_values": images.numpy()})[0], exact(module, images)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
    assert result.fused and all(fused), "the caller's attention was changed"


@pytest.mark.slow
def test_aoti_of_a_module(tmp_path: Path) -> None:
    module = small()
    export_aoti(open_source(module, img_size=(16, 12)), AotiConfig(out=tmp_path / "out", device="cpu"), show=False)
    backend = load_backend("aoti", open_source(tmp_path / "out" / "model.pt2"))
    images = torch.randn(3, 1, 16, 12)
    got, want = backend.run({"pixel_values": images})["logits"].numpy(), exact(module, images)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def test_evaluation_and_prediction_of_a_module(mean_colour: nn.Module, photos: Path, tmp_path: Path) -> None:
    source = open_source(mean_colour, img_size=16, classes=CLASSES)
    found = evaluate_source(source, EvalConfig(data=photos))
    assert (found.metrics.top1, found.metrics.count) == (1.0, 6)  # type: ignore[union-attr]
    result = predict_images(source, PredictConfig(images=photos, out=tmp_path / "p.csv"))
    assert [p.labels[0] for p in result.predictions] == [name for name in CLASSES for _ in range(2)]


def test_names_are_wanted_where_labels_are_given(mean_colour: nn.Module, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="classes="):
        predict_images(open_source(mean_colour, img_size=16), PredictConfig(images=photos, out=tmp_path / "p.csv"))
