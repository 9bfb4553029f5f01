"""Stock tools take every kind of file: ONNX's checker and strict shape inference, and ONNX Runtime's quantiser."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import nn

from vtk.__main__ import main
from vtk.errors import UsageError

KINDS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "fp16": ("--dtype", "fp16"),
    "fp16 inside": ("--dtype", "fp16", "--keep-io-types"),
    "int8 dynamic": ("--int8", "dynamic"),
    "int8 static": ("--int8", "static", "--data", "PHOTOS"),
    "softmax": ("--softmax",),
    "raw images": ("--with-preproc",),
    "old": ("--target", "ort:1.16"),
}


def check(path: Path) -> onnx.ModelProto:
    """Check a file as strictly as ONNX can; no shape of a weight stands beside the weight itself."""
    onnx.checker.check_model(str(path), full_check=True)
    proto = onnx.load(path)
    onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    weights = {tensor.name for tensor in proto.graph.initializer}
    assert not weights & {value.name for value in proto.graph.value_info}
    return proto


def quantize(path: Path) -> None:
    """Quantise a file with the function as everybody calls it, and run both on the same input."""
    target = path.with_suffix(".quantized")
    quantize_dynamic(str(path), str(target), weight_type=QuantType.QInt8)
    sessions = [onnxruntime.InferenceSession(p, providers=["CPUExecutionProvider"]) for p in (path, target)]
    rng, feeds = np.random.default_rng(0), {}
    for entry in sessions[0].get_inputs():
        sides = [side if isinstance(side, int) else 2 if side == "batch" else 48 for side in entry.shape]
        values = rng.integers(0, 255, sides) if entry.type == "tensor(uint8)" else rng.standard_normal(sides)
        feeds[entry.name] = values.astype(np.uint8 if entry.type == "tensor(uint8)" else np.float32)
    plain, small = (session.run(None, feeds)[0] for session in sessions)
    assert not np.array_equal(plain, small)
    assert np.abs(plain - small).max() < 0.2 * np.abs(plain).max()
    target.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_is_strictly_valid_and_can_be_quantised(
    kind: str, calm: Any, fake_calm: Any, tmp_path: Path
) -> None:
    fake_calm()
    flags = [str(calm.photos) if word == "PHOTOS" else word for word in KINDS[kind]]
    assert main(["export", "onnx", str(calm.path), "--out", str(tmp_path), "--threads", "1", *flags]) == 0
    check(tmp_path / "model.onnx")
    if not kind.startswith(("fp16", "int8")):  # the quantiser is for fp32
        quantize(tmp_path / "model.onnx")


def test_shapes_of_what_is_computed_stay(exported_calm: Any, exported_static: Any) -> None:
    for run in (exported_calm, exported_static):
        assert check(run.out / "model.onnx").graph.value_info
        quantize(run.out / "model.onnx")


def test_int8_for_tensorrt_has_the_form_that_its_parser_takes(
    calm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def form(model: nn.Module, fuse: bool | None, **options: bool) -> nn.Module:
        seen.extend([fuse, options, {m.fused_attn for m in model.modules() if hasattr(m, "fused_attn")}])
        raise UsageError("enough")

    monkeypatch.setattr("vtk_export.onnx.build.choose_form", form)
    flags = ["--int8", "static", "--data", str(calm.photos), "--target", "trt:10.9"]
    assert main(["export", "onnx", str(calm.path), "--out", str(tmp_path), *flags]) == 2
    assert seen == [None, {"vits": True, "divide_scores": False, "fixed_size": True}, {False}]


@pytest.mark.slow
def test_an_int8_file_for_tensorrt_passes_the_linter(calm: Any, tmp_path: Path) -> None:
    flags = ["--int8", "static", "--data", str(calm.photos), "--target", "trt:10.9", "--threads", "1"]
    assert main(["export", "onnx", str(calm.path), "--out", str(tmp_path), *flags]) == 0
    assert main(["export", "tensorrt", str(tmp_path / "model.onnx"), "--lint", "--trt", "10.9"]) == 0
    proto = check(tmp_path / "model.onnx")
    assert sum(node.op_type == "DequantizeLinear" for node in proto.graph.node) > 5


def test_what_tensorrt_cannot_parse_is_refused_at_export(
    calm: Any, fake_calm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_calm()  # timm's own graph, whose reshapes are computed
    flags = ["--target", "trt:10.9", "--no-fuse", "--threads", "1"]
    assert main(["export", "onnx", str(calm.path), "--out", str(tmp_path / "out"), *flags]) == 4
    said = capsys.readouterr().err
    assert "TensorRT 10.9 cannot take the graph: `node_Reshape" in said
    assert not (tmp_path / "out").exists()
