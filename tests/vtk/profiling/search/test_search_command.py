"""`vtk profile --on cpu` through the command line."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vtk.__main__ import main
from vtk.errors import UsageError
from vtk.profiling.config import ProfileCommand
from vtk.profiling.search import accuracy
from vtk.profiling.search.report import FILES
from vtk.runtime.backends.base import load_backend


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    """An .onnx of another program: flatten and one linear layer, any batch size, no card."""
    return write_linear(tmp_path / "linear.onnx", "batch")


def write_linear(path: Path, batch: str | int) -> Path:
    weight = np.random.default_rng(0).normal(size=(3 * 8 * 8, 4)).astype(np.float32)
    nodes = [helper.make_node("Flatten", ["pixel_values"], ["flat"]),
             helper.make_node("MatMul", ["flat", "w"], ["logits"])]  # fmt: skip
    shapes = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
              for name, shape in (("pixel_values", [batch, 3, 8, 8]), ("logits", [batch, 4]))}  # fmt: skip
    graph = helper.make_graph(
        nodes, "linear", [shapes["pixel_values"]], [shapes["logits"]], [numpy_helper.from_array(weight, "w")]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def test_a_file_is_searched_and_the_result_is_written(
    linear: Path, tmp_path: Path, local: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = ["--on", "cpu", "--budget-ms", "1000", "--batch-sizes", "1,2", "--duration", "0.1", "--threads", "1"]
    assert main(["profile", str(linear), *options, "--out", str(out), "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert {path.name for path in out.iterdir()} == set(FILES)
    variants = {(row["backend"], row["precision"]) for row in found["setups"]}
    assert {("ort-cpu", "fp32"), ("openvino", "fp32")} <= variants and found["percentile"] == 50
    assert found["choice"]["meets"] and found["best"]["batch"] == found["choice"]["batch"]
    # it is a file already: how it is run is said, and nothing is exported
    assert found["command"] == "" and found["note"].startswith("run it in") and "run it in" in captured.err
    assert all(row["reason"] == "" for row in found["setups"])
    assert found["best"]["status"] == "complete" and found["best"] in found["setups"]


def test_a_back_end_that_loses_its_accuracy_is_left_out(
    linear: Path, tmp_path: Path, local: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    for i in range(4):
        Image.fromarray(np.random.default_rng(i).integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(
            tmp_path / f"{i}.png"
        )

    def unfair(name: str, *arguments: Any, **options: Any) -> Any:
        backend = load_backend(name, *arguments, **options)
        right = backend.run
        if name == "openvino":
            backend.run = lambda inputs: {"logits": -right(inputs)["logits"]}  # type: ignore[method-assign]
        return backend

    monkeypatch.setattr(accuracy, "load_backend", unfair)
    options = ["--on", "cpu", "--budget-ms", "1000", "--batch-sizes", "1", "--duration", "0.1", "--threads", "1"]
    options += ["--data", str(tmp_path), "--precision", "fp32", "--json"]
    assert main(["profile", str(linear), *options]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert {v["backend"]: v["passed"] for v in found["accuracy"]} == {"openvino": False, "ort-cpu": True}
    assert {row["backend"] for row in found["setups"]} == {"ort-cpu"}
    assert "openvino fp32: left out: " in captured.err


@pytest.mark.parametrize(("options", "said"), [
    ({"on": "cpu"}, "give --budget-ms"), ({"exhaustive": True}, "add --on cpu"),
    ({"on": "cpu", "budget_ms": 1.0, "device": "cuda"}, "contradicts --on cpu"),
    ({"on": "cpu", "budget_ms": 1.0, "precision": "fp16"}, "none of a CPU's"),
    ({"on": "cpu", "budget_ms": 1.0, "h2d": "in", "ceilings": True}, "does nothing with --h2d and --ceilings"),
    ({"data": "x"}, "is only for --precision fp8"), ({"on": "gpu", "budget_ms": 1.0}, "`--on` is gpu"),
])  # fmt: skip
def test_contradictions_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        ProfileCommand(source="test_vit", **options)
    assert said in str(caught.value)


@pytest.mark.parametrize(("backends", "said"), [
    ("compile", "searches openvino, ort-cpu"), ("fused", "`fused` does not run the onnx"), ("nothing", "nothing"),
])  # fmt: skip
def test_back_ends_that_are_not_searched_are_refused(
    linear: Path, backends: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(linear), "--on", "cpu", "--budget-ms", "9", "--backends", backends]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_a_file_of_one_batch_size_is_searched_at_that_one(
    tmp_path: Path, local: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_linear(tmp_path / "three.onnx", 3)
    options = ["--on", "cpu", "--budget-ms", "1000", "--duration", "0.02", "--threads", "2", "--backends", "ort-cpu"]
    assert main(["profile", str(path), *options, "--batch-sizes", "1,2"]) == 2
    assert "none that this file takes (3 to 3 images a call)" in capsys.readouterr().err
    assert main(["profile", str(path), *options, "--batch-sizes", "1,3", "--json"]) == 0
    assert {row["batch"] for row in json.loads(capsys.readouterr().out)["setups"]} == {3}


@pytest.mark.slow
@pytest.mark.parametrize("backends", ["openvino", "ort-cpu,fused"])
def test_the_recommended_command_runs_as_printed(
    backends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--no-pretrained", "--num-classes", "5", "--img-size", "32", "--batch-sizes", "1,4", "--seed", "3"]
    options += ["--on", "cpu", "--budget-ms", "5000", "--duration", "0.5", "--backends", backends]
    assert main(["profile", "test_vit", *options]) == 0
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed.startswith("  vtk export ")
    argv = shlex.split(printed)[1:]
    assert main([*argv, "--json"]) == 0
    exported = json.loads(capsys.readouterr().out)
    assert Path(exported["path"]).is_file()
    # what was exported is what was searched: it is searched again, against the model
    again = ["--on", "cpu", "--budget-ms", "5000", "--duration", "0.5", "--batch-sizes", "4", "--threads", "1"]
    assert main(["profile", exported["path"], *again]) == 0
