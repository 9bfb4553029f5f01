"""``--dynamic-size``: files that take several sizes, against timm, and models that take one."""

import copy
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
from vtk_export.graph.convert import _name_sides
from vtk_export.graph.sizes import Sizes, check_sizes, other_sizes, probe_sizes
from vtk_export.onnx.build import _check_resize
from vtk_export.onnx.config import OnnxConfig
from vtk_export.onnx.export import export_onnx


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
    with pytest.raises(VerificationError, match="the model's height became the constant 32 in the graph"):
        _name_sides(exported_calm.proto.graph)


def test_a_wrong_other_size_fails_the_gate(dynamic: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is right at the model's own size only: its table is resampled by another filter."""
    proto = onnx.load(dynamic.path)
    for node in proto.graph.node:
        for attribute in node.attribute if node.op_type == "Resize" else ():
            if attribute.name == "mode":
                attribute.s = b"linear"
    monkeypatch.setattr("vtk_export.onnx.build.convert", lambda *args, **kwargs: proto)
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
    with pytest.raises(UsageError, match="--dynamic-size leaves open"):
        OnnxConfig(out=Path("y"), dynamic_size=True, with_preproc=True)


def fails(session: Any, size: tuple[int, int], batch: int = 2) -> bool:
    try:
        session.run(None, {"pixel_values": np.zeros((batch, 3, *size), np.float32)})
    except Exception as error:
        return "images_are_multiples_of_16x16" in str(error) or "Invalid" in str(error) or "size" in str(error)
    return False


@pytest.mark.parametrize("optimise", [True, False])
def test_sizes_that_timm_refuses_end_the_run_with_an_error(dynamic: Any, optimise: bool) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(dynamic.path, options, providers=["CPUExecutionProvider"])
    model = Dynamic.model(dynamic)
    for size in ((36, 32), (32, 36), (33, 33), (31, 32), (15, 32), (32, 1), (40, 24), (0, 32), (8, 8), (17, 96)):
        with pytest.raises((AssertionError, RuntimeError)):
            model(torch.zeros(2, 3, *size))
        assert fails(session, size), size
    for size in ((16, 16), (16, 48), (64, 32)):
        assert not fails(session, size), size


KINDS: dict[str, tuple[str, dict[str, Any], Sizes]] = {
    "patch of 8": ("vit_tiny_patch16_224", {"patch_size": 8, "img_size": 96}, Sizes((8, 8), (8, 8))),
    "padded": ("vit_tiny_patch16_224", {"img_size": 96, "dynamic_img_pad": True}, Sizes()),
    "hybrid": ("vit_tiny_r_s16_p8_224", {"img_size": 96}, Sizes((1, 1), (29, 29))),
    "windows": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 96, "window_size": 3, "depths": (1, 1), "num_heads": (2, 2), "embed_dim": 16,
         "strict_img_size": False},
        Sizes((4, 4), (4, 4)),
    ),
    "convolutions": ("test_resnet", {}, Sizes()),
    "a stem of strides": ("test_convnext", {}, Sizes((1, 1), (32, 32))),
}  # fmt: skip


def varied(kind: str) -> nn.Module:
    name, kwargs, _ = KINDS[kind]
    small = {"depth": 1, "embed_dim": 32, "num_heads": 2, "dynamic_img_size": True} if name.startswith("vit") else {}
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=3, **small, **kwargs).eval()


_QUICK = ("patch of 8", "windows")
_BY_COST = [kind if kind in _QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("kind", _BY_COST)
def test_what_sizes_a_model_takes_is_found_by_trying(kind: str) -> None:
    assert probe_sizes(varied(kind), InputSpec(96, 96)) == KINDS[kind][2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_answers_exactly_the_sizes_that_timm_answers(kind: str, tmp_path: Path) -> None:
    model = varied(kind)
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    card = Card(ModelSpec(kind), InputSpec(96, 96), ("a", "b", "c"))

    class Held(Source):
        def model(self) -> nn.Module:
            return copy.deepcopy(model)

    config = OnnxConfig(out=tmp_path / "out", dynamic_size=True, threads=1)
    made = export_onnx(Held("timm", kind, None, card, described=False), config, show=False)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(made.path, options, providers=["CPUExecutionProvider"])
    for size in ((96, 96), (97, 96), (64, 100), (36, 44), (28, 96), (7, 7), (31, 64), (96, 3), (128, 40)):
        images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
        try:
            with torch.no_grad():
                expected = model(images).numpy()
        except (AssertionError, RuntimeError):
            expected = None
        try:
            found = session.run(None, {"pixel_values": images.numpy()})[0]
        except Exception:
            found = None
        assert (found is None) == (expected is None), size
        if expected is not None:
            np.testing.assert_allclose(found, expected, atol=1e-3 * np.abs(expected).max(), rtol=0, err_msg=str(size))
