"""A classifier of zeros, as timm starts those of mixers: the file has it, and the gate still compares something."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from timm.models.mlp_mixer import MlpMixer
from torch import nn

import vtk_export.onnx.export
from vtk.card import Card, InputSpec, ModelSpec
from vtk.errors import VerificationError
from vtk.runtime.source import Source
from vtk_export.aoti import export as aoti
from vtk_export.aoti import gate as aoti_gate
from vtk_export.aoti.config import AotiConfig
from vtk_export.gate.zero_head import fill_zero_head
from vtk_export.onnx.config import OnnxConfig
from vtk_export.onnx.export import export_onnx
from vtk_export.tensorrt.config import TensorrtConfig
from vtk_export.tensorrt.export import export_tensorrt


class Mixer(Source):
    """A mixer without weights."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = MlpMixer(num_classes=3, num_blocks=1, embed_dim=16, img_size=32, patch_size=16)
        for p in model.head.parameters():
            p.data.zero_()
        return model.eval()


def mixer() -> Source:
    card = Card(ModelSpec("mixer"), InputSpec(32, 32), ("a", "b", "c"))
    return Mixer("timm", "mixer", None, card, described=False)


def export(out: Path, **options: Any) -> Any:
    return export_onnx(mixer(), OnnxConfig(out=out, **options), show=False)


def test_a_mixer_without_weights_is_exported_with_its_zeros(tmp_path: Path) -> None:
    made = export(tmp_path / "out", threads=1, output="both")
    assert len(made.rows) == 10 and all(row.passed and row.compared for row in made.rows if row.output == "logits")
    assert sorted(p.name for p in made.path.parent.iterdir()) == ["README.md", "model.json", "model.onnx"]
    session = onnxruntime.InferenceSession(made.path, providers=["CPUExecutionProvider"])
    images = torch.randn(2, 3, 32, 32)
    logits, features = session.run(["logits", "features"], {"pixel_values": images.numpy()})
    assert not logits.any()
    with torch.no_grad():
        model = Mixer.model(made)
        expected = model.forward_head(model.forward_features(images), pre_logits=True).numpy()
    np.testing.assert_allclose(features, expected, atol=1e-5)


@pytest.mark.slow
def test_a_wrong_graph_of_a_mixer_still_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = vtk_export.onnx.build.convert

    def wrong(*args: Any, **kwargs: Any) -> onnx.ModelProto:
        proto = right(*args, **kwargs)
        weight = next(t for t in proto.graph.initializer if len(t.dims) == 4)
        weight.raw_data = np.roll(np.frombuffer(weight.raw_data, np.float32), 1).tobytes()
        return proto

    monkeypatch.setattr("vtk_export.onnx.build.convert", wrong)
    with pytest.raises(VerificationError, match="max error"):
        export(tmp_path / "out", threads=1)
    monkeypatch.setattr(
        "vtk_export.onnx.build.convert", lambda m, *a, **k: (right if m.head.weight.any() else wrong)(m, *a, **k)
    )
    with pytest.raises(VerificationError, match="differs from that of the file that passed"):
        export(tmp_path / "out", threads=1)
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.slow
def test_a_mixer_without_weights_is_exported_for_tensorrt(tmp_path: Path) -> None:
    made = export_tensorrt(mixer(), TensorrtConfig(out=tmp_path / "out"), show=False)
    assert all(row.passed and row.compared for row in made.rows) and not (tmp_path / "out" / "filled").exists()
    session = onnxruntime.InferenceSession(made.path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"pixel_values": np.ones((2, 3, 32, 32), np.float32)})
    assert logits.shape == (2, 3) and not logits.any()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, nn.Module]:
    """In place of the compiler and of the process that runs its files: the models themselves, by folder."""
    models: dict[str, nn.Module] = {}

    def answers(folder: Path, batches: dict[str, torch.Tensor], *_: Any) -> Any:
        with torch.no_grad():
            return {f"load.py, plain, {name}": models[folder.name](part) for name, part in batches.items()}, []

    def compile_package(model: nn.Module, example: Any, card: Card, precision: str, path: Path) -> None:
        models[path.parent.name if path.parent.name == "filled" else "own"] = model
        models[path.parent.name] = model
        path.write_bytes(b"library")

    monkeypatch.setattr(aoti, "compile_package", compile_package)
    monkeypatch.setattr(aoti_gate, "answers", answers)
    monkeypatch.setattr(aoti.aoti_backend.AotiBackend, "check_compiler", lambda: None)
    return models


def test_a_mixer_without_weights_is_compiled_with_its_zeros(
    tmp_path: Path, compiled: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = aoti.export_aoti(mixer(), AotiConfig(out=tmp_path / "out", device="cpu"), show=False)
    assert all(row.passed and row.compared for row in made.rows)
    assert compiled["filled"].head.weight.any() and not compiled["own"].head.weight.any()
    assert not (tmp_path / "out" / "filled").exists()
    seen = []

    def wrong(folder: Path, batches: dict[str, torch.Tensor], *_: Any) -> Any:
        seen.append(folder.name)
        with torch.no_grad():  # the copy is right, the file that would be kept is not
            found = {f"load.py, plain, {name}": compiled["filled"](part) for name, part in batches.items()}
        return found, []

    monkeypatch.setattr(aoti_gate, "answers", wrong)
    with pytest.raises(VerificationError, match="the logits of the file are not"):
        aoti.export_aoti(mixer(), AotiConfig(out=tmp_path / "other", device="cpu"), show=False)
    assert len(seen) == 2 and not (tmp_path / "other").exists()


def test_only_a_classifier_of_zeros_is_filled() -> None:
    model = Mixer.model(None)  # type: ignore[arg-type]
    filled = fill_zero_head(model)
    assert filled is not None and filled.head.weight.any() and not model.head.weight.any()
    model.head.bias.data += 1
    assert fill_zero_head(model) is None and fill_zero_head(nn.Identity()) is None
