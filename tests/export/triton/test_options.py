"""Options of the ONNX exporter in a repository: softmax, int8, latency; and which back-end refuses what, and why."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from vtk.__main__ import main
from vtk.data.decoding.images import load_image
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.errors import UsageError
from vtk_export.triton.config import TritonCommand


def run(*argv: object) -> int:
    return main(["export", "triton", *map(str, argv)])


def parse(path: Path) -> Any:
    return text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())


def answers(file: Path, packed: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the first output of a file for the photographs, and torch's logits."""
    transform = eval_transform(packed.card.input)
    images = np.stack([transform(load_image(path)).numpy() for path in sorted((packed.photos / "a").iterdir())])
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    import torch

    with torch.no_grad():
        return session.run(None, {"pixel_values": images})[0], packed.model()(torch.from_numpy(images)).numpy()


def test_softmax_is_the_graph_s_of_one_model(packed: Any, fake_exporter: Any, tmp_path: Path) -> None:
    fake_exporter()
    repo = tmp_path / "models"
    assert run(f"pets={packed.path}", "--softmax", "--out", repo) == 0
    found = parse(repo / "pets" / "config.pbtxt")
    assert [(e.name, list(e.dims), e.label_filename) for e in found.output] == [("probabilities", [5], "labels.txt")]
    assert json.loads((repo / "pets" / "client.json").read_text())["outputs"] == ["probabilities"]
    shares, logits = answers(repo / "pets" / "1" / "model.onnx", packed)
    want = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(shares, want / want.sum(1, keepdims=True), atol=1e-5)


def test_softmax_of_tasks_is_the_server_s(packed: Any, fake_exporter: Any, tmp_path: Path) -> None:
    fake_exporter()
    repo = tmp_path / "models"
    assert run(f"pets={packed.path}", "--backend", "python", "--softmax", "--out", repo) == 0
    found = parse(repo / "pets" / "config.pbtxt")
    assert [e.name for e in found.output] == ["probabilities", "label", "score"]
    assert found.parameters["softmax"].string_value == "1"
    graph = onnx.load(repo / "pets" / "1" / "model.onnx").graph
    assert [value.name for value in graph.output] == ["logits"]  # of which the server takes the softmax, and the score


@pytest.mark.parametrize("backend", ["onnxruntime", "python"])
def test_int8_is_judged_and_written(calm: Any, fake_calm: Any, tmp_path: Path, backend: str, capsys: Any) -> None:
    fake_calm()
    repo = tmp_path / "models"
    argv = (f"pets={calm.path}", "--backend", backend, "--int8", "dynamic", "--data", calm.photos, "--json")
    argv = (*argv, "--max-batch-size", 1)
    assert run(*argv, "--out", repo) == 0
    told = json.loads(capsys.readouterr().out)["models"][0]
    assert told["facts"]["int8"] == "dynamic" and told["judged"]["count"] == 6
    file = repo / "pets" / "1" / "model.onnx"
    assert any(node.op_type == "MatMulInteger" for node in onnx.load(file).graph.node)
    logits, wanted = answers(file, calm)
    assert (logits.argmax(1) == wanted.argmax(1)).mean() == told["judged"]["agreement"]
    assert 1e-6 < np.abs(logits - wanted).max() / np.abs(wanted).max() < 0.2


def test_latency_is_in_the_version_when_it_appears(
    packed: Any, fake_exporter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    fake_exporter()
    monkeypatch.setattr("vtk.profiling.export_profile.SECONDS", 0.05)
    repo = tmp_path / "models"
    assert run(f"pets={packed.path}", "--profile", "2", "--threads", "1", "--out", repo, "--json") == 0
    out, err = capsys.readouterr()
    version = repo / "pets" / "1"
    assert sorted(os.listdir(version)) == ["latency.json", "latency.png", "model.json", "model.onnx"]
    found = json.loads((version / "latency.json").read_text())
    assert found["source"] == str(version / "model.onnx") and f"wrote {version / 'latency.json'}" in err
    assert json.loads(out)["models"][0]["profile"] == found
    cells = [
        cell["batch"] for backend in found["backends"] for cell in backend["cells"] if backend["name"] == "ort-cpu"
    ]
    assert cells == [2]


ONE, TWO = ("p",), ("p", "q")


@pytest.mark.parametrize(
    ("backend", "sources", "options", "said"),
    [
        ("python", ONE, {"dtype": "fp16"}, "no arithmetic in 16 bits"),
        ("python", TWO, {"int8": "dynamic"}, "share their weights in fp32"),
        ("python", ONE, {"server_device": "gpu"}, "runs on the CPU"),
        ("python", ONE, {"engine": Path("e")}, "--backend tensorrt"),
        ("python", ONE, {"with_preproc": True, "ensemble": False}, "takes normalised tensors"),
        ("vtk", ONE, {"int8": "dynamic"}, "without a graph"),
        ("vtk", ONE, {"profile": (1,)}, "vtk profile PACK --backends bank"),
        ("tensorrt", ONE, {"softmax": True}, "ends with the logits"),
        ("tensorrt", ONE, {"int8": "static", "data": Path("d")}, "fp32, fp16"),
        ("tensorrt", TWO, {"engine": Path("e")}, "belongs to one source"),
        ("onnxruntime", ONE, {"engine": Path("e")}, "--backend tensorrt"),
        ("onnxruntime", ONE, {"int8": "static"}, "--data"),
        ("onnxruntime", ONE, {"int8": "dynamic", "dtype": "fp16"}, "--int8"),
        ("onnxruntime", ONE, {"ensemble": True}, "--with-preproc"),
        ("onnxruntime", ONE, {"with_preproc": True, "ensemble": True, "static_batch": 2}, "--static-batch"),
        ("onnxruntime", ONE, {"profile": (0,)}, "--profile"),
        ("onnxruntime", ONE, {"images": 0}, "--images"),
    ],
)
def test_what_a_back_end_cannot_do_is_refused_with_the_reason(
    backend: Any, sources: tuple[str, ...], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        TritonCommand(out=Path("models"), sources=sources, backend=backend, **options)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_bf16_has_no_place_in_numpy(packed: Any, tmp_path: Path, capsys: Any) -> None:
    argv = (f"p={packed.path}", "--dtype", "bf16", "--with-preproc", "--ensemble", "--out", tmp_path / "models")
    assert run(*argv) == 2
    assert "--keep-io-types" in capsys.readouterr().err and os.listdir(tmp_path) == []
