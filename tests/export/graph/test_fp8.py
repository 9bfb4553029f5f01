"""``--dtype fp8``: where e4m3 stands in the graph, its scales, how the file is judged, and how it is refused."""

import contextlib
import copy
import dataclasses
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from tests.kernels.test_e4m3 import decoded
from vtk.__main__ import main
from vtk.errors import UsageError, VerificationError
from vtk.runtime.export_facts import read_facts
from vtk_export.graph.fp8 import quantize_fp8, wide_products
from vtk_export.lint.linter import lint
from vtk_export.onnx import build, gate
from vtk_export.onnx.config import OnnxConfig
from vtk_export.targets import parse_target, takes_fp8
from vtk_export.tensorrt.config import TensorrtConfig, parse_version

DECODED = np.array([decoded(code) for code in range(256)])
OUT = Path("out")


def _run(*argv: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*map(str, argv), "--threads", "1", "--json"])
    return code, out.getvalue(), err.getvalue()


CONVERTED: list[onnx.ModelProto] = []
"""What torch's exporter made for `made`; it takes seconds."""


@pytest.fixture(scope="module")
def made(calm: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """Return a folder of TensorRT's form, what was printed as JSON, and what was said."""
    out = tmp_path_factory.mktemp("fp8") / "trt"

    def convert(*args: Any, **kwargs: Any) -> onnx.ModelProto:
        proto = build.convert_by_torch(*args, **kwargs)  # type: ignore[attr-defined]
        CONVERTED.append(copy.deepcopy(proto))
        return proto

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "convert_by_torch", build.convert, raising=False)
        patch.setattr(build, "convert", convert)
        code, found, said = _run("export", "tensorrt", calm.path, "--out", out, "--dtype", "fp8", "--data", calm.photos)
    assert code == 0, said
    return out, json.loads(found), said


def test_wide_products_read_e4m3_and_nothing_else_does(made: Any) -> None:
    out, found, said = made
    proto = onnx.load(out / "model.onnx")
    onnx.checker.check_model(proto, full_check=True)
    makers = {name: node for node in proto.graph.node for name in node.output}
    types = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    assert (proto.opset_import[0].version, proto.ir_version) == (19, 9)
    eight, others = [], []
    for node in proto.graph.node:
        if node.op_type in ("MatMul", "Gemm"):
            factors = [makers.get(name) for name in node.input[:2]]
            read = [factor is not None and factor.op_type == "DequantizeLinear" for factor in factors]
            assert all(read) or not any(read)
            (eight if all(read) else others).append(node)
            if all(read):
                tokens, weight = factors
                assert makers[tokens.input[0]].op_type == "QuantizeLinear"  # type: ignore[union-attr]
                assert types[weight.input[0]] == TensorProto.FLOAT8E4M3FN  # type: ignore[union-attr]
    # of the one block q, k, v, fc1 and fc2; not scores, their product with v, the projection and the classifier
    assert (len(eight), len(others)) == (5, 4)
    assert not [name for name, kind in types.items() if kind == TensorProto.FLOAT and "fp8" in name]
    assert lint(proto, parse_version("10.x")) == []
    assert found["precision"] == "fp8" and found["profile"]["precision"] == "fp16" and found["profile"]["fp8"]
    assert "--stronglyTyped" in (out / "build.sh").read_text()
    assert "calibrated on 3 images of" in said and "in 3 of 3 images of" in said and "95 % interval" in said


def test_scales_hold_every_weight_and_twice_every_token(made: Any, calm: Any) -> None:
    proto = onnx.load(made[0] / "model.onnx")
    values = {tensor.name: tensor for tensor in proto.graph.initializer}
    fc1 = calm.model().blocks[0].mlp.fc1.weight.detach() * calm.model().blocks[0].norm2.weight.detach()
    fc1 = (fc1 - fc1.mean(1, keepdim=True)).double().numpy().T  # as the fused form folds the norm into it
    weights = 0
    for node in proto.graph.node:
        if node.op_type == "QuantizeLinear":
            scale = numpy_helper.to_array(values[node.input[1]])
            assert scale.dtype == np.float16 and scale.shape == () and np.log2(float(scale)) % 1 == 0
        if node.op_type != "DequantizeLinear" or node.input[0] not in values:
            continue
        tensor, scale = values[node.input[0]], numpy_helper.to_array(values[node.input[1]])
        codes = DECODED[np.frombuffer(tensor.raw_data, np.uint8)].reshape(tensor.dims)
        assert scale.dtype == np.float16 and scale.shape == (tensor.dims[1],) and (scale >= 2.0**-14).all()
        # the largest number of a channel is 448, or the one below where the scale was rounded up to fp16
        assert set(np.abs(codes).max(0)) <= {448.0, 416.0}
        if list(tensor.dims) == list(fc1.shape):
            step = np.maximum(np.abs(fc1) / 16, scale.astype(np.float64) * 2.0**-10)
            assert (np.abs(codes * scale.astype(np.float64) - fc1) <= step * 1.01).all()
            weights += 1
    assert weights == 1


def test_the_file_is_run_by_onnxruntime_alone_and_is_no_fp16_file(made: Any, calm: Any) -> None:
    images = torch.randn(4, 3, 32, 48)
    options = onnxruntime.SessionOptions()
    session = onnxruntime.InferenceSession(made[0] / "model.onnx", options, providers=["CPUExecutionProvider"])
    got = session.run(None, {"pixel_values": images.numpy().astype(np.float16)})[0].astype(np.float64)
    with torch.no_grad():
        expected = calm.model()(images).double().numpy()
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert 2e-3 < error < 0.1  # fp16 is off by 1e-3


def test_a_file_of_fp8_says_so_and_is_evaluated(made: Any, calm: Any) -> None:
    file = made[0] / "model.onnx"
    facts = read_facts({p.key: p.value for p in onnx.load(file).metadata_props}, file)
    assert facts.fp8 and facts.precision == "fp16" and facts.kind == "fp8" and facts.calibrated
    code, found, said = _run("eval", file, calm.photos, "--split", "all", "--workers", 0)
    assert code == 0 and json.loads(found)["precision"] == "fp8"
    assert "this file is fp8, the rest fp16" in said


@pytest.mark.slow
def test_a_cpus_times_of_a_file_in_fp8_are_not_called_those_of_fp8(made: Any) -> None:
    argv = ("profile", made[0] / "model.onnx", "--backends", "ort-cpu", "--batch-sizes", "1", "--duration", "0.1")
    code, found, _ = _run(*argv)
    assert code == 0 and any("these times are not those of fp8" in text for text in json.loads(found)["warnings"])


def test_a_file_whose_answers_change_is_not_kept(
    calm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any
) -> None:
    monkeypatch.setattr(build, "convert", lambda *args, **kwargs: copy.deepcopy(CONVERTED[0]))
    real = gate.judge
    monkeypatch.setattr(gate, "judge", lambda *a, **k: dataclasses.replace(real(*a, **k), agreement=2 / 3))
    argv = ("export", "onnx", calm.path, "--out", tmp_path / "out", "--dtype", "fp8", "--data", calm.photos)
    code, _, said = _run(*argv)
    assert code == 4 and "fp8: the most likely class is that of fp32 in 2 of 3 images of" in said
    assert "66.7 % (95 % interval 20.8 % to 93.9 %), needed is 99 %; use --dtype fp16" in said
    assert not (tmp_path / "out" / "model.onnx").exists()


def test_fewer_images_than_a_batch_calibrate_nothing(
    made: Any, calm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "convert", lambda *args, **kwargs: copy.deepcopy(CONVERTED[0]))
    argv = ("export", "onnx", calm.path, "--out", tmp_path / "out", "--dtype", "fp8", "--data", calm.photos)
    code, _, said = _run(*argv, "--static-batch", 4)
    assert code == 3 and "needs a batch of 4 images (--static-batch), and there are only 3" in said


def graph() -> onnx.ModelProto:
    """Return tokens (batch, 4, 8) times two weights, one of them of a channel of zeros and a tiny one."""
    w = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    w[:, 1], w[:, 2] = 0, 1e-7
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("MatMul", ["x", "v"], ["z"]),
             helper.make_node("Add", ["y", "z"], ["out"])]  # fmt: skip
    made = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4, 8])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", 4, 4])],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(w[::-1].copy(), "v")],
    )  # fmt: skip
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def test_products_that_share_tokens_share_a_pair_and_values_twice_as_large_still_fit() -> None:
    proto = graph()
    assert [node.output[0] for node in wide_products(proto)] == ["y", "z"]
    assert quantize_fp8(proto, {"x": 3.0}) == 2
    onnx.checker.check_model(proto, full_check=True)
    assert Counter(n.op_type for n in proto.graph.node) == {
        "QuantizeLinear": 1, "DequantizeLinear": 3, "MatMul": 2, "Add": 1,
    }  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = {t.name: t for t in graph().graph.initializer}
    w = numpy_helper.to_array(values["w"]) + numpy_helper.to_array(values["v"])
    for size in (0.01, 1.0, 3.0, 6.0):
        x = np.full((1, 4, 8), size, np.float32)
        got, expected = session.run(None, {"x": x})[0], x @ w
        assert np.abs(got - expected).max() <= 0.12 * size * np.abs(w).sum(0).max()
        assert np.isfinite(got).all() and not got[..., 1].any()  # of the channel of zeros


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_calibration_on_what_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(VerificationError, match="makes `x` NaN or infinite; leave it out of --data"):
        quantize_fp8(graph(), {"x": bad})
    proto = graph()
    del proto.graph.node[:2]
    with pytest.raises(VerificationError, match="no product of tokens"):
        quantize_fp8(proto, {})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"data": None}, "give --data FOLDER"),
        ({"int8": "static"}, "`--int8` leaves the rest in fp32, which --dtype fp8 contradicts"),
        ({"dynamic_size": True}, "--dynamic-size leaves open"),
        ({"output": "features"}, "give --output both"),
        ({"target": "trt:8.6"}, "trt:8.6"),
        ({"target": "ort:1.15"}, "IR version 9"),
        ({"target": "ort:1.14"}, "IR version 9"),
        ({"ir_version": 8}, "--ir-version 8 gives 8"),
    ],
)
def test_what_does_not_go_with_fp8_is_refused_in_one_line(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        OnnxConfig(**{"out": OUT, "dtype": "fp8", "data": Path("pictures"), **options})
    assert "\n" not in str(caught.value)


def test_run_times_that_take_e4m3_are_known() -> None:
    assert all(
        takes_fp8(parse_target(t)) for t in ("ort:1.16", "ort:1.31", "trt:10.x", "trt:11.1", "tritonserver:24.10")
    )
    assert not any(takes_fp8(parse_target(t)) for t in ("ort:1.15", "trt:8.6"))
    config = OnnxConfig(out=OUT, dtype="fp8", data=Path("d"), target="ort:1.16")
    assert (config.file_opset, config.graph_opset, config.ir, config.rest) == (19, 19, 9, "fp16")
    assert OnnxConfig(out=OUT, dtype="fp8", data=Path("d"), opset=21).file_opset == 21
    with pytest.raises(UsageError, match="give --data FOLDER"):
        TensorrtConfig(out=OUT, dtype="fp8")
