"""``--with-preproc``: the nodes against Pillow on images of many sizes, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from PIL import Image

from vtk.__main__ import main
from vtk.card import InputSpec
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.errors import UsageError, VerificationError
from vtk.runtime.onnx_file import open_onnx
from vtk_export.gate.drift import Drift
from vtk_export.gate.limits import LIMITS
from vtk_export.graph.preproc import check_preproc, prepend
from vtk_export.onnx.config import OnnxConfig
from vtk_export.onnx.preproc_gate import check_drift

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = ((40, 60), (61, 41), (20, 25), (100, 37), (3, 90))


def identity(spec: InputSpec, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """Return a graph that gives back its input."""
    shape = ["batch", 3, *spec.size]
    values = [helper.make_tensor_value_info(name, kind, shape) for name in ("pixel_values", "logits")]
    graph = helper.make_graph([helper.make_node("Identity", ["pixel_values"], ["logits"])], "g", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def photograph(height: int, width: int, noise: bool) -> Image.Image:
    rng = np.random.default_rng(height * width)
    if noise:
        return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("mode", ["crop", "squash", "pad"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("size", "crop"), [((32, 32), 0.875), ((33, 33), 0.95), ((32, 48), 1.0), ((48, 32), 0.9)])
def test_nodes_do_what_pillow_does(size: tuple[int, int], crop: float, interpolation: str, mode: Any) -> None:
    spec = InputSpec(*size, mean=MEAN, std=STD, interpolation=interpolation, crop_pct=crop, resize_mode=mode)
    proto = identity(spec)
    prepend(proto, spec)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    transform = eval_transform(spec)
    for height, width in SIZES:
        for noise in (False, True):
            image = photograph(height, width, noise)
            (got,) = session.run(None, {"images": np.asarray(image)[None]})[0]
            levels = np.abs(got - transform(image).numpy()) * np.array(STD).reshape(3, 1, 1) * 255
            assert got.shape == (3, *size)
            # what lies between two levels may be rounded to the other one; of bilinear weights, many lie there
            assert levels.max() < 1.01, (height, width, noise)
            assert levels.mean() < (0.06 if interpolation == "bilinear" else 0.005), (height, width, noise)


@pytest.mark.parametrize(
    ("size", "chooses", "vertical"),
    [
        ((100, 37), True, True),  # to 43 × 32: 57 rows fewer, 5 columns
        ((100, 37), False, False),
        ((60, 61), True, False),  # to 43 × 32: 17 rows fewer, 29 columns
        ((60, 40), True, True),  # 17 rows, 8 columns
        ((61, 41), True, False),  # 18 rows, 9 columns: not more than twice as many
        ((30, 20), True, False),  # more rows
        ((43, 50), True, False),  # as many rows
        ((50, 20), True, True),  # 7 rows fewer, 12 columns more
    ],
)
def test_axes_are_filtered_in_the_order_of_the_pillow_installed(
    size: tuple[int, int], chooses: bool, vertical: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtk_export.graph.preproc.CHOOSES_ORDER", chooses)
    spec = InputSpec(43, 32, mean=(0.0,) * 3, std=(1.0,) * 3, interpolation="bicubic", resize_mode="squash")
    proto = identity(spec)
    prepend(proto, spec)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    image = photograph(*size, True)
    (got,) = session.run(None, {"images": np.asarray(image)[None]})[0]
    height, width = size
    # of one axis at a time, no Pillow has a choice
    between = (width, 43) if vertical else (32, height)
    expected = image.resize(between, Image.Resampling.BICUBIC).resize((32, 43), Image.Resampling.BICUBIC)
    levels = np.abs(255 * got.transpose(1, 2, 0) - np.asarray(expected, np.float32))
    assert levels.max() < 1.01
    assert levels.mean() < 0.005


def test_rows_of_a_batch_are_prepared_alike_and_types_are_kept() -> None:
    spec = InputSpec(16, 16, mean=MEAN, std=STD)
    proto = identity(spec, TensorProto.FLOAT16)
    prepend(proto, spec)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    images = np.stack([np.asarray(photograph(24, 40, False)), np.asarray(photograph(40, 24, False)).swapaxes(0, 1)])
    both = session.run(None, {"images": images})[0]
    assert both.dtype == np.float16
    for i in range(2):
        np.testing.assert_array_equal(session.run(None, {"images": images[i : i + 1]})[0][0], both[i])
    assert np.abs(both[0] - both[1]).max() > 0.1


def export(packed: Any, out: Path, *argv: object) -> int:
    return main(["export", "onnx", str(packed.path), "--out", str(out), "--threads", "1", *map(str, argv)])


@pytest.mark.parametrize("argv", [(), ("--dtype", "fp16"), ("--static-batch", 2)], ids=["fp32", "fp16", "static"])
def test_exported_file_takes_bytes_and_drift_is_measured(
    calm: Any, exported_calm: Any, fake_calm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    argv: tuple[object, ...],
) -> None:  # fmt: skip
    def fixed(proto: onnx.ModelProto) -> None:
        if "--static-batch" in argv:
            for value in (proto.graph.input[0], proto.graph.output[0]):
                value.type.tensor_type.shape.dim[0].dim_value = 2
            proto.graph.ClearField("value_info")

    fake_calm(fixed)
    assert export(calm, tmp_path, "--with-preproc", "--data", calm.photos, "--json", *argv) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    drift = result["preprocessing_drift"]
    assert drift["count"] == 6
    assert 0.999 <= drift["cosine_min"] < 1
    assert "preprocessing in the graph against Pillow's, on 6 images of" in printed.err
    assert result["facts"]["preprocessing"] is True
    proto = onnx.load(tmp_path / "model.onnx")
    (entry,) = proto.graph.input
    assert (entry.name, entry.type.tensor_type.elem_type) == ("images", TensorProto.UINT8)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    images = np.stack([np.asarray(photograph(50, 70, False))] * 2)
    got = session.run(["logits"], {"images": images})[0].astype(np.float32)
    with torch.no_grad():
        expected = calm.model()(eval_transform(calm.card.input)(Image.fromarray(images[0]))[None])
    np.testing.assert_allclose(got, expected.expand(2, -1).numpy(), atol=0.02 * float(expected.abs().max()))
    assert open_onnx(tmp_path / "model.onnx").card.classes == calm.card.classes
    # what resizes and normalises by itself must not be given such a file
    assert main(["eval", str(tmp_path), str(calm.photos), "--workers", "0"]) == 2
    assert "takes raw images" in capsys.readouterr().err


def test_wrong_nodes_are_found_and_nothing_is_kept(
    calm: Any, fake_calm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def upside_down(proto: onnx.ModelProto, spec: InputSpec) -> None:
        prepend(proto, dataclasses.replace(spec, mean=(0.9, 0.1, 0.9), std=(0.2, 0.9, 0.1)))

    fake_calm()
    monkeypatch.setattr("vtk_export.onnx.preproc_gate.prepend", upside_down)
    out = tmp_path / "out"
    assert export(calm, out, "--with-preproc") == 4
    assert "with the preprocessing in the graph the outputs have a cosine of" in capsys.readouterr().err
    assert not out.exists()


def test_drawn_images_are_used_without_data(
    calm: Any, fake_calm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_calm()
    assert export(calm, tmp_path / "out", "--with-preproc", "--json") == 0
    assert json.loads(capsys.readouterr().out)["preprocessing_drift"]["what"] == "drawn images of several sizes"


def test_images_that_cannot_be_read_are_no_measurement(
    calm: Any, fake_calm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_calm()
    monkeypatch.setattr("vtk_export.onnx.preproc_gate._images", lambda *_: iter(()))
    assert export(calm, tmp_path / "out", "--with-preproc", "--data", calm.photos) == 3
    assert "no image could be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (InputSpec(8, 8, in_chans=1, mean=(0.5,), std=(0.5,)), "takes 1 channel"),
        (InputSpec(8, 8, interpolation="nearest"), "cannot resize by `nearest`.*in a server ensemble"),
    ],
)
def test_what_the_nodes_cannot_do_is_refused(spec: InputSpec, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_preproc(spec)


def test_a_target_that_cannot_resize_is_refused() -> None:
    with pytest.raises(UsageError, match=r"trt:10.9 cannot resize with antialiasing.*in a server ensemble"):
        OnnxConfig(out=Path("y"), with_preproc=True, target="trt:10.9")


@pytest.mark.parametrize("cosine", [0.9989, float("nan")])
def test_a_drift_beyond_the_bound_fails(cosine: float) -> None:
    drift = Drift(5, "images", cosine, 0.1, 0.01, 1.0)
    with pytest.raises(VerificationError, match="leave out --with-preproc"):
        check_drift(drift, LIMITS["fp32"])
    check_drift(dataclasses.replace(drift, cosine_min=0.9991), LIMITS["fp32"])
