"""``--dynamic-size``: files that take several sizes, against timm, and models that take one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from torch import nn

from vtk.__main__ import main
from vtk.card import Card, InputSpec, ModelSpec
from vtk.errors import UsageError, VerificationError
from vtk.runtime.onnx_file import open_onnx
from vtk.runtime.source import Source
from vtk_export.build import _check_resize
from vtk_export.config import OnnxConfig
from vtk_export.convert import _name_sides
from vtk_export.onnx import export_onnx
from vtk_export.sizes import check_sizes, other_sizes


class Dynamic(Source):
    """A ViT that resamples its position table, as no name gives it."""

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        model = timm.create_model(
            "vit_tiny_patch16_224", num_classes=5, img_size=32, depth=1, embed_dim=32, num_heads=2,
            dynamic_img_size=True,
        )  # fmt: skip
        for p in model.parameters():
            p.data += 0.05 * torch.randn_like(p)
        return model.eval()


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory: pytest.TempPathFactory) -> Any:
    card = Card(ModelSpec("dynamic"), InputSpec(32, 32), tuple("abcde"))
    out = tmp_path_factory.mktemp("dynamic") / "onnx"
    config = OnnxConfig(out=out, dynamic_size=True, threads=1)
    return export_onnx(Dynamic("timm", "dynamic", None, card, described=False), config, show=False)


@pytest.mark.parametrize("size", [(32, 32), (48, 32), (16, 80), (96, 112)], ids=str)
def test_file_gives_timms_logits_at_every_size(dynamic: Any, size: tuple[int, int]) -> None:
    images = torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = Dynamic.model(dynamic)(images).numpy()
    session = onnxruntime.InferenceSession(dynamic.path, providers=["CPUExecutionProvider"])
    got = session.run(["logits"], {"pixel_values": images.numpy()})[0]
    np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


def test_axes_are_named_and_other_sizes_were_verified(dynamic: Any) -> None:
    (entry,) = onnx.load(dynamic.path).graph.input
    assert [d.dim_param or d.dim_value for d in entry.type.tensor_type.shape.dim] == ["batch", 3, "height", "width"]
    assert [(row.batch, row.size) for row in dynamic.rows[5:]] == [(2, (48, 32)), (2, (32, 64)), (2, (16, 16))]
    assert all(row.passed for row in dynamic.rows)
    assert open_onnx(dynamic.path).facts.dynamic_size


@pytest.mark.slow
def test_a_convolutional_network_takes_several_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["export", "onnx", "test_resnet", "--no-pretrained", "--out", str(tmp_path), "--dynamic-size", "--json"]
    assert main([*argv, "--threads", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["facts"]["dynamic_size"] is True
    assert sorted({tuple(row["size"]) for row in result["verified"] if row["size"]})


def test_a_model_of_one_size_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    argv = ["export", "onnx", "vit_tiny_patch16_224", "--no-pretrained", "--out", str(out), "--dynamic-size"]
    assert main(argv) == 2
    message = capsys.readouterr().err
    assert "`--dynamic-size`: vit_tiny_patch16_224 takes images of 224×224 only (Input height (240)" in message
    assert not out.exists()


def test_sizes_to_try_are_whole_patches() -> None:
    model = timm.create_model("test_vit", img_size=64)
    assert other_sizes(model, InputSpec(64, 96)) == ((80, 96), (64, 128), (48, 80))
    assert other_sizes(nn.Identity(), InputSpec(32, 32))[2] == (32, 32)
    check_sizes(nn.Identity(), InputSpec(32, 32), "x")


def test_an_axis_that_became_a_number_is_found(exported_calm: Any) -> None:
    with pytest.raises(VerificationError, match="the model's height became the number 32 in the graph"):
        _name_sides(exported_calm.proto.graph)


def test_a_wrong_other_size_fails_the_gate(dynamic: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is right at the model's own size only: its table is resampled by another filter."""
    proto = onnx.load(dynamic.path)
    for node in proto.graph.node:
        for attribute in node.attribute if node.op_type == "Resize" else ():
            if attribute.name == "mode":
                attribute.s = b"linear"
    monkeypatch.setattr("vtk_export.build.convert", lambda *args, **kwargs: proto)
    card = Card(ModelSpec("dynamic"), InputSpec(32, 32), tuple("abcde"))
    config = OnnxConfig(out=tmp_path / "out", dynamic_size=True, threads=1)
    with pytest.raises(VerificationError, match=r"batch 2 of 48×32 pixels: max error"):
        export_onnx(Dynamic("timm", "dynamic", None, card, described=False), config, show=False)
    assert not (tmp_path / "out").exists()


def test_a_run_time_that_cannot_resample_is_refused(dynamic: Any) -> None:
    config = OnnxConfig(out=Path("y"), dynamic_size=True, target="trt:10.9")
    with pytest.raises(UsageError, match=r"trt:10.9 cannot resample this model's position table"):
        _check_resize(onnx.load(dynamic.path), config)


def test_a_size_of_its_own_and_any_size_contradict_each_other() -> None:
    with pytest.raises(UsageError, match="--dynamic-size opens it"):
        OnnxConfig(out=Path("y"), dynamic_size=True, with_preproc=True)
