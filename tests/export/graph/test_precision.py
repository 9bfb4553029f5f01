"""``--dtype fp16`` and ``bf16``: what is in the file, what it computes, and every way in which it is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from vtk.__main__ import main
from vtk.card import Card, InputSpec, ModelSpec
from vtk.errors import UnavailableError, UsageError, VerificationError
from vtk.runtime.export_facts import KEY
from vtk_export.graph.precision import LARGEST, float_values, to_half
from vtk_export.onnx.config import OnnxConfig
from vtk_export.onnx.value_ranges import check_range

Fault = Callable[[onnx.ModelProto], None]


def graph(nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], opset: int = 18) -> onnx.ModelProto:
    """Return a graph from `pixel_values` (batch, 3, 4, 4) to `logits` (batch, 2)."""
    inputs = [helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["batch", 3, 4, 4])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])]
    stored = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    made = helper.make_graph(nodes, "g", inputs, outputs, stored)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def network(opset: int = 18, scale: float = 1.0) -> onnx.ModelProto:
    """Return a convolution, a norm, a softmax, a product and a mean."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["pixel_values", "kernel"], ["patches"], name="stem", strides=[2, 2]),
        helper.make_node("Flatten", ["patches"], ["tokens"], name="flat"),
        helper.make_node("LayerNormalization", ["tokens", "gain", "shift"], ["normed"], name="norm"),
        helper.make_node("Softmax", ["normed"], ["weights"], name="softmax"),
        helper.make_node("MatMul", ["weights", "matrix"], ["product"], name="fc"),
        helper.make_node("Add", ["product", "bias"], ["sum"], name="add"),
        helper.make_node("Reshape", ["sum", "shape"], ["pairs"], name="pairs"),
        helper.make_node("ReduceMean", ["pairs", "axis"], ["logits"], name="mean", keepdims=0),
    ]
    weights = {
        "kernel": rng.standard_normal((2, 3, 2, 2)).astype(np.float32),
        "gain": np.linspace(0.5, 1.5, 8, dtype=np.float32),
        "shift": np.zeros(8, np.float32),
        "matrix": scale * rng.standard_normal((8, 4)).astype(np.float32),
        "bias": np.ones(4, np.float32),
        "shape": np.array([0, 2, 2]),
        "axis": np.array([2]),
    }
    return graph(nodes, weights, opset)


def run(proto: onnx.ModelProto, images: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["logits"], {"pixel_values": images})[0]


def types(proto: onnx.ModelProto) -> dict[str, int]:
    """Return the type of every value, by ONNX's own inference."""
    inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True).graph
    found = {v.name: v.type.tensor_type.elem_type for v in (*inferred.input, *inferred.value_info, *inferred.output)}
    return found | {t.name: t.data_type for t in inferred.initializer}


@pytest.mark.parametrize("keep", [False, True], ids=["half-io", "fp32-io"])
def test_fp16_graph_computes_what_the_fp32_graph_does(keep: bool) -> None:
    plain, half = network(), network()
    makers = to_half(half, "fp16", keep_io_types=keep)
    onnx.checker.check_model(half, full_check=True)
    kind = TensorProto.FLOAT if keep else TensorProto.FLOAT16
    for value in (half.graph.input[0], half.graph.output[0]):
        assert value.type.tensor_type.elem_type == kind
    images = np.random.default_rng(1).standard_normal((3, 3, 4, 4)).astype(np.float32)
    expected = run(plain, images)
    got = run(half, images if keep else images.astype(np.float16))
    assert got.dtype == (np.float32 if keep else np.float16)
    np.testing.assert_allclose(got, expected, atol=4e-3)
    assert np.abs(got - expected).max() > 0
    assert makers["patches"] == "stem (Conv)"
    assert "tokens" in makers


def test_norm_softmax_and_reductions_stay_fp32_and_weights_are_stored_in_fp16() -> None:
    proto = network()
    to_half(proto, "fp16")
    kinds = types(proto)
    for node in proto.graph.node:
        inside = {kinds[name] for name in (*node.input, *node.output)} - {TensorProto.INT64}
        if node.op_type in ("LayerNormalization", "Softmax", "ReduceMean"):
            assert inside == {TensorProto.FLOAT}, node.name
        elif node.op_type != "Cast":
            assert inside == {TensorProto.FLOAT16}, node.name
    stored = {t.name: t.data_type for t in proto.graph.initializer}
    assert {name.removesuffix("_fp16") for name, kind in stored.items() if kind == TensorProto.FLOAT16} == {
        "kernel", "matrix", "bias"
    }  # fmt: skip
    # between two operators in fp32 there is no way through fp16
    softmax = next(node for node in proto.graph.node if node.op_type == "Softmax")
    assert softmax.input[0] == "normed_fp32"
    assert [n.op_type for n in proto.graph.node].count("Cast") == 4


@pytest.mark.parametrize(("opset", "kind"), [(18, TensorProto.FLOAT), (22, TensorProto.BFLOAT16)])
def test_the_convolution_is_bf16_from_opset_22(opset: int, kind: int) -> None:
    proto = network(opset)
    to_half(proto, "bf16")
    onnx.checker.check_model(proto, full_check=True)
    kinds = types(proto)
    conv = next(node for node in proto.graph.node if node.op_type == "Conv")
    assert [kinds[name] for name in (*conv.input, *conv.output)] == [kind] * 3
    product = next(node for node in proto.graph.node if node.op_type == "MatMul")
    assert kinds[product.input[1]] == TensorProto.BFLOAT16
    stored = next(t for t in proto.graph.initializer if t.name == "matrix_bf16")
    plain = next(t for t in network(opset).graph.initializer if t.name == "matrix")
    expected = numpy_helper.to_array(plain).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(numpy_helper.to_array(stored).astype(np.float32), expected)


def test_a_weight_beyond_fp16_is_named_and_bf16_takes_it() -> None:
    with pytest.raises(VerificationError, match=r"the weight `matrix` of `fc` \(MatMul\) reaches .*e\+05, fp16 ends at "
                                                r"65504; use --dtype bf16 or fp32"):  # fmt: skip
        to_half(network(scale=1e5), "fp16")
    to_half(network(scale=1e5), "bf16")


def test_control_flow_is_refused() -> None:
    branch = helper.make_graph([], "b", [], [])
    proto = graph([helper.make_node("If", ["c"], ["logits"], name="fork", then_branch=branch, else_branch=branch)], {})
    with pytest.raises(UsageError, match=r"`fork` \(If\) is control flow"):
        to_half(proto, "fp16")


def test_types_are_found_without_the_weights() -> None:
    assert float_values(network()) == {
        "pixel_values", "kernel", "patches", "tokens", "gain", "shift", "normed", "weights", "matrix", "product",
        "bias", "sum", "pairs", "logits",
    }  # fmt: skip


@pytest.mark.parametrize(("scale", "fails"), [(1e4, False), (6e4, True)])
def test_an_activation_beyond_fp16_is_named_by_its_node(tmp_path: Path, scale: float, fails: bool) -> None:
    plain, half = network(scale=scale), network(scale=scale)
    for proto in (plain, half):  # four weights of 6e4 / 3 fit, their sum does not
        matrix = next(t for t in proto.graph.initializer if t.name == "matrix")
        matrix.CopyFrom(numpy_helper.from_array(np.full((8, 4), scale, np.float32), "matrix"))
        bias = next(t for t in proto.graph.initializer if t.name == "bias")
        bias.CopyFrom(numpy_helper.from_array(np.full(4, scale / 2, np.float32), "bias"))
    card = Card(ModelSpec("x"), InputSpec(4, 4), ("a", "b"))
    makers = to_half(half, "fp16")
    options: dict[str, Any] = {"dtype": "fp16", "folder": tmp_path, "threads": 1, "static_batch": None}
    images = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    if fails:
        with pytest.raises(VerificationError, match=r"the output `sum` of `add \(Add\)` reaches 9e\+04 in fp32, fp16"):
            check_range(plain, makers, card, images, **options)
    else:
        check_range(plain, makers, card, images, **options)
    assert list(tmp_path.iterdir()) == []
    assert scale < LARGEST["fp16"]


def export(calm: Any, out: Path, *argv: object) -> int:
    return main(["export", "onnx", str(calm.path), "--out", str(out), "--threads", "1", *map(str, argv)])


@pytest.mark.parametrize("keep", [[], ["--keep-io-types"]], ids=["half-io", "fp32-io"])
def test_fp16_export_is_judged_on_photographs_and_runs_in_eval(
    calm: Any, fake_calm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], keep: list[str]
) -> None:
    fake_calm()
    assert export(calm, tmp_path, "--dtype", "fp16", "--data", calm.photos, "--json", *keep) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["judged"]["count"] == 6
    assert result["judged"]["agreement"] == 1.0
    assert 0.9999 <= result["judged"]["cosine_min"] < 1
    assert result["judged"]["top1"] is not None
    assert result["facts"]["precision"] == "fp16"
    assert result["facts"]["keep_io_types"] is bool(keep)
    assert all(row["cosine"] >= 0.9999 for row in result["verified"])
    assert main(["eval", str(tmp_path), str(calm.photos), "--split", "all", "--json", "--workers", "0"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["precision"] == "fp16"
    assert "this file is fp16" in printed.err
    argv = ["profile", str(tmp_path), "--backends", "ort-cpu", "--batch-sizes", "1", "--duration", "0.1"]
    assert main([*argv, "--threads", "1"]) == 0  # in the precision of the file
    printed = capsys.readouterr().out
    assert "this file is fp16" in printed and "· fp16 ·" in printed
    assert main([*argv, "--precision", "fp32"]) == 2
    assert "computes in fp16, not in fp32" in capsys.readouterr().err
    assert main(["eval", str(tmp_path), str(calm.photos), "--precision", "fp32", "--workers", "0"]) == 2
    assert "a file's precision is fixed, give --precision fp16" in capsys.readouterr().err


def test_bf16_that_nothing_here_runs_is_exit_5_unless_told(
    calm: Any, fake_calm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fake_calm()
    out = tmp_path / "bf16"
    assert export(calm, out, "--dtype", "bf16") == 5
    assert "onnxruntime cannot run bf16 here" in capsys.readouterr().err
    assert not out.exists()
    assert export(calm, out, "--dtype", "bf16", "--unverified", "--json") == 0
    printed = capsys.readouterr()
    assert "not verified: onnxruntime cannot run bf16 here" in printed.err
    result = json.loads(printed.out)
    assert (result["facts"]["verified"], result["verified"]) == (False, [])
    assert export(calm, out, "--dtype", "bf16", "--unverified", "--with-preproc") == 0
    assert export(calm, out, "--dtype", "bf16", "--unverified") == 0
    capsys.readouterr()
    proto = onnx.load(out / "model.onnx")
    assert proto.graph.input[0].type.tensor_type.elem_type == TensorProto.BFLOAT16
    assert json.loads({p.key: p.value for p in proto.metadata_props}[KEY])["verified"] is False
    assert main(["profile", str(out), "--backends", "ort-cpu", "--precision", "bf16", "--batch-sizes", "1"]) != 0
    assert "its outputs were not compared with torch" in capsys.readouterr().out


def _turned(proto: onnx.ModelProto) -> None:
    """Rotate the classifier's rows: another class, and another direction of the logits."""
    tensor = next(t for t in proto.graph.initializer if t.name == "head.weight")
    tensor.CopyFrom(numpy_helper.from_array(np.roll(numpy_helper.to_array(tensor), 1, 0), tensor.name))


def _heavy(proto: onnx.ModelProto) -> None:
    tensor = next(t for t in proto.graph.initializer if t.name == "head.bias")
    tensor.CopyFrom(numpy_helper.from_array(np.full(5, 1e5, np.float32), tensor.name))


@pytest.mark.parametrize(
    ("fault", "message"),
    [(_turned, "the cosine with PyTorch is"), (_heavy, "the weight `head.bias` of `node_")],
    ids=["wrong-weights", "overflow"],
)
def test_a_wrong_fp16_file_is_exit_4_and_not_kept(
    calm: Any, fake_calm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: Fault, message: str
) -> None:
    fake_calm(fault)
    assert export(calm, tmp_path / "new", "--dtype", "fp16") == 4
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_provider_that_fails_for_another_reason_is_no_missing_precision(tmp_path: Path) -> None:
    from vtk_export.gate.verify import open_sessions

    proto = network()
    proto.graph.node[0].op_type = "Unheard"
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(VerificationError, match="cannot load"), open_sessions(tmp_path / "model.onnx", 1):
        pass
    half = network(22)
    to_half(half, "bf16")
    onnx.save(half, tmp_path / "model.onnx")
    if not torch.cuda.is_available():
        with pytest.raises(UnavailableError, match="bf16"), open_sessions(tmp_path / "model.onnx", 1):
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_io_types": True}, "--keep-io-types"),
        ({"images": 0}, "--images"),
        ({"softmax": True, "output": "features"}, "--softmax"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        OnnxConfig(out=Path("y"), **options)
