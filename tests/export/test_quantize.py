"""``--int8``: what onnxruntime's quantiser wrote, how it is judged, and every way in which it is refused."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper

from vtk.__main__ import main
from vtk.errors import UsageError, VerificationError
from vtk.runtime.data_option import data_images
from vtk.runtime.photographs import Photographs
from vtk_export.gate.judge import Judgement, check_judgement
from vtk_export.gate.limits import LIMITS, with_budget
from vtk_export.onnx.config import OnnxConfig


@pytest.fixture
def export(
    calm: Any, fake_calm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[onnx.ModelProto, dict[str, Any], str]]:
    fake_calm()

    def run(*argv: object) -> tuple[onnx.ModelProto, dict[str, Any], str]:
        out = tmp_path / "out"
        argv = ("export", "onnx", calm.path, "--out", out, "--threads", 1, "--json", "--data", calm.photos, *argv)
        assert main(list(map(str, argv))) == 0
        printed = capsys.readouterr()
        assert sorted(p.name for p in out.iterdir()) == ["README.md", "model.json", "model.onnx"]
        return onnx.load(out / "model.onnx"), json.loads(printed.out), printed.err

    return run


def _weights(proto: onnx.ModelProto, kind: int) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer if t.data_type == kind}


def test_dynamic_has_int8_weights_and_integer_products(export: Any, exported_calm: Any) -> None:
    proto, result, _ = export("--int8", "dynamic")
    kinds = Counter(node.op_type for node in proto.graph.node)
    plain = Counter(node.op_type for node in exported_calm.proto.graph.node)
    # qkv, proj, fc1, fc2 and the head; the two products of attention have no weights
    assert kinds["MatMulInteger"] == 5
    assert kinds["MatMul"] == 2
    assert kinds["Softmax"] == plain["Softmax"]
    assert kinds["LayerNormalization"] == plain["LayerNormalization"]
    assert {node.domain for node in proto.graph.node} <= {"", "ai.onnx"}
    assert [entry.domain for entry in proto.opset_import] == [""]
    # no large float is left but the patch convolution and the position table
    floats = [name for name, value in _weights(proto, TensorProto.FLOAT).items() if value.size > 200]
    assert sorted(name.partition(".")[0] for name in floats) == ["patch_embed", "pos_embed"]
    assert result["facts"]["int8"] == "dynamic"
    assert result["nodes"] == len(proto.graph.node)
    assert result["judged"]["count"] == 6
    assert result["judged"]["top1"] is not None


def test_static_has_one_scale_an_activation_weights_per_channel_and_float_biases(export: Any) -> None:
    proto, result, said = export("--int8", "static", "--calibration-images", 3)
    graph = proto.graph
    values = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    quantized = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    assert len(quantized) == 4  # what qkv, proj, fc1 and fc2 read
    for node in quantized:
        assert values[node.input[1]].ndim == 0
        assert values[node.input[2]].dtype == np.uint8
    scaled = 0
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in values:  # weights: one scale a channel
            weight, scale = values[node.input[0]], values[node.input[1]]
            axis = next(a.i for a in node.attribute if a.name == "axis")
            assert weight.dtype == np.int8
            assert scale.shape == (weight.shape[axis],)
            assert len(np.unique(scale)) > 1
            scaled += 1
        if node.op_type in ("Conv", "Gemm"):  # the first and the last product
            assert values[node.input[1]].dtype == np.float32
    assert scaled == 4
    assert not any(value.dtype == np.int32 for value in values.values())  # int32 biases
    for node in graph.node:
        if node.op_type in ("Softmax", "LayerNormalization"):
            assert makers[node.input[0]].op_type != "DequantizeLinear"
    assert "calibrated on 3 images of " in said
    assert result["judged"]["count"] == 3  # the other half of the six
    assert "trt" not in result["oldest"]  # TensorRT takes no other zero point than 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_onnxruntime_multiplies_all_weights_in_int8(kind: str, calm: Any, tmp_path: Path) -> None:
    source = "vit_tiny_patch16_224"  # a plain Vision Transformer, which is fused where nobody says otherwise
    model = ["--no-pretrained", "--img-size", "32", "--num-classes", "3", "--images", "2"]
    model += ["--calibration-images", "2"] if kind == "static" else []
    argv = ["export", "onnx", source, *model, "--out", str(tmp_path), "--int8", kind, "--data", str(calm.photos)]
    assert main(argv) == 0
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(tmp_path / "optimized.onnx").graph
    values = {t.name for t in graph.initializer}
    floats = [n for n in graph.node if n.op_type in ("MatMul", "FusedMatMul", "Gemm", "FusedGemm")]
    left = [n for n in floats if n.input[1] in values]
    assert [n.op_type for n in left] == ([] if kind == "dynamic" else ["Gemm"])  # of one row an image: the classifier


def test_int8_files_run_in_eval_and_say_what_they_are(
    export: Any, calm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export("--int8", "dynamic")
    assert main(["eval", str(tmp_path / "out"), str(calm.photos), "--split", "all", "--workers", "0", "--json"]) == 0
    printed = capsys.readouterr()
    assert "this file is int8 (dynamic)" in printed.err
    found = json.loads(printed.out)
    assert found["precision"] == "fp32" and found["batch_size"] == 1  # each image in a call of its own
    # its rounding differs with the optimisations of the graph, which is no wrong output
    argv = ["profile", str(tmp_path / "out"), "--backends", "ort-cpu", "--batch-sizes", "1", "--duration", "0.1"]
    assert main([*argv, "--threads", "1", "--json"]) == 0
    printed = capsys.readouterr()
    (backend,) = json.loads(printed.out)["backends"]
    assert backend["status"] == "measured"
    assert "this file is int8 (dynamic)" in printed.err


def _zero_head(proto: onnx.ModelProto) -> None:
    tensor = next(t for t in proto.graph.initializer if t.name == "head.weight")
    value = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.roll(value, 1, 0), tensor.name))


def test_an_int8_file_with_wrong_weights_is_not_kept(
    calm: Any, fake_calm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_calm(_zero_head)
    out = tmp_path / "out"
    assert main(["export", "onnx", str(calm.path), "--out", str(out), "--threads", "1", "--int8", "dynamic"]) == 4
    assert "the cosine with PyTorch is" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("result", "kind", "message"),
    [
        (
            Judgement(200, 0.985, 0.99999, 0.99995),
            "fp16",
            r"agreement with PyTorch is 98.50 %, at least 99.50 % is required",
        ),
        (Judgement(200, 1.0, 0.99985, 0.99), "fp16", r"mean cosine with PyTorch is 0.999850, at least 0.9999"),
        (Judgement(200, 1.0, float("nan"), 0.99), "fp16", r"cosine with PyTorch is nan"),
        (
            Judgement(200, 0.99, 0.95, 0.9, 0.80, 0.82),
            "int8",
            r"top-1 drops from 82.00 % to 80.00 %, by more than 1",
        ),
        (Judgement(200, 0.88, 0.95, 0.9), "int8", r"agreement with PyTorch is 88.00 %"),
        # one wrong matrix can leave most classes as they are
        (Judgement(200, 1.0, 0.945, 0.6, 0.8, 0.8), "int8", r"cosine with PyTorch is 0.945000, at least 0.95"),
    ],
)
def test_a_judgement_beyond_its_bound_fails(result: Judgement, kind: str, message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        check_judgement(result, LIMITS[kind])


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (Judgement(200, 0.995, 0.99995, 0.9999), "fp16"),
        (Judgement(20, 0.95, 0.99995, 0.9999), "fp16"),  # one image of twenty
        (Judgement(200, 0.95, 0.95, 0.9, 0.81, 0.82), "int8"),
        (Judgement(200, 0.85, 0.95, 0.9, 0.83, 0.82), "int8"),  # other classes, and more of them right
        (Judgement(20, 0.95, 0.95, 0.9, 0.75, 0.8), "int8"),
    ],
)
def test_a_judgement_within_its_bounds_passes(result: Judgement, kind: str) -> None:
    check_judgement(result, LIMITS[kind])


def test_a_budget_judges_by_itself_and_by_images_that_it_has_not_seen(export: Any, calm: Any) -> None:
    proto, result, said = export("--int8", "static", "--max-drop", 20)
    given = data_images(calm.card, calm.photos)
    parts = [set(part.paths) for part in (given.calibration[0], *given.choice)]
    assert [len(part) for part in parts] == [3, 2, 1] and len(set.union(*parts)) == 6
    assert result["judged"]["count"] == 1
    assert "int8 changes the class of 0 of 2 images" in said and "none of the products of 4 activations" in said
    assert sum(node.op_type == "QuantizeLinear" for node in proto.graph.node) == 4
    tight = with_budget(LIMITS["int8"], 0.5)
    check_judgement(Judgement(400, 0.996, 0.99, 0.9), tight)
    with pytest.raises(VerificationError, match=r"agreement with PyTorch is 99.00 %, at least 99.50 %"):
        check_judgement(Judgement(400, 0.99, 0.99, 0.9), tight)
    with pytest.raises(VerificationError, match=r"top-1 drops from 82.00 % to 81.25 %, by more than 0.5 %"):
        check_judgement(Judgement(400, 0.99, 0.99, 0.9, 0.8125, 0.82), tight)


def test_photographs_are_split_between_calibration_and_judgement(calm: Any) -> None:
    halves = data_images(calm.card, calm.photos).calibration
    calibrated, judged = (Photographs(half, 10) for half in halves)
    assert len(judged.paths) == len(calibrated.paths) == 3
    assert not set(judged.paths) & set(calibrated.paths)
    assert judged.labels == [0, 0, 0]
    other = dataclasses.replace(calm.card, classes=("x", "y"))
    assert Photographs(data_images(other, calm.photos).judging, 2).labels is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"int8": "static"}, "give --data FOLDER"),
        ({"int8": "dynamic", "dtype": "fp16"}, "contradicts"),
        ({"calibration_images": 0}, "--calibration-images"),
        ({"max_drop": 1.0}, "says how much --int8 static may change; add that"),
        ({"max_drop": 1.0, "int8": "static", "data": Path("x"), "output": "features"}, "has none; give --output both"),
        ({"max_drop": 0.0, "int8": "static", "data": Path("x")}, "--max-drop"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        OnnxConfig(out=Path("y"), **options)
