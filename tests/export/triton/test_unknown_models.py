"""Models for Triton with the output ``unknown``, and calibrated scores of our Python back-ends."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.export._calibrated import IMAGES, shares
from tests.export._fake_server import Load, request
from vtk.__main__ import main
from vtk_export.triton.config import TritonConfig
from vtk_export.triton.export import export_triton
from vtk_export.triton.pbtxt import read_text


def threshold_of(path: Path) -> float:
    card = json.loads(path.read_text())
    return float(card["metrics"]["threshold"]["score"])


def test_a_graph_has_unknown_and_a_client_asks_for_it(calibrated: Path, calm: Any, tmp_path: Path) -> None:
    out = tmp_path / "models"
    config = TritonConfig(
        out=out, name="m", threshold="auto", risk=0.02, softmax=True, output_name=("unknown=refused",)
    )
    export_triton(calibrated, config, show=False)
    message = read_text((out / "m" / "config.pbtxt").read_text())
    kinds = {entry.name: (entry.data_type, list(entry.dims), entry.HasField("reshape")) for entry in message.output}
    bool_kind = message.output[0].DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_name["TYPE_BOOL"].number
    assert kinds["refused"] == (bool_kind, [1], True) and list(kinds) == ["probabilities", "refused"]
    about = json.loads((out / "m" / "client.json").read_text())
    assert about["outputs"] == ["probabilities", "unknown"] and about["names"] == {"unknown": "refused"}
    assert next(iter(about["tasks"].values()))["temperature"] == 1.5
    assert "`refused`: true where" in (out / "m" / "README.md").read_text()
    session = onnxruntime.InferenceSession(out / "m" / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    found, refused = session.run(["probabilities", "refused"], {"pixel_values": IMAGES.numpy()})
    score = shares(calm.model()).max(1)
    np.testing.assert_allclose(found.max(1), score, atol=1e-5)
    at = threshold_of(out / "m" / "1" / "model.json")
    assert ((refused == (score < at)) | (np.abs(score - at) < 1e-6)).all() and 4 <= refused.sum() <= 12


@pytest.mark.slow
def test_openvino_has_unknown_too(calibrated: Path, calm: Any, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    out = tmp_path / "models"
    config = TritonConfig(out=out, name="o", backend="openvino", precision="fp32", threshold="auto", fuse=False)
    export_triton(calibrated, config, show=False)
    message = read_text((out / "o" / "config.pbtxt").read_text())
    assert [entry.name for entry in message.output] == ["logits", "unknown"]
    model = openvino.compile_model(out / "o" / "1" / "model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    images = IMAGES.numpy().copy()
    images[3] = np.nan
    found = model(images)["unknown"]
    score = shares(calm.model()).max(1)
    at = threshold_of(out / "o" / "1" / "model.json")
    wanted = np.where(np.arange(16) == 3, True, score < at)
    assert found.dtype == bool and ((found == wanted) | (np.abs(score - at) < 1e-6)).all()
    assert 4 <= wanted.sum() <= 12


@pytest.mark.parametrize("argv", [("--backend", "python"), ("--backend", "vtk"), ("--backend", "tensorrt")])
def test_back_ends_that_give_scores_alone_refuse_it(
    calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]
) -> None:
    line = ["export", "triton", str(calibrated), "--out", str(tmp_path / "models"), "--threshold", "auto", *argv]
    assert main(line) == 2
    assert "`--threshold` is not for --backend" in capsys.readouterr().err


def test_scores_of_our_python_back_ends_are_calibrated_and_logits_are_not(load: Load) -> None:
    load("tasks_model")
    rows = sys.modules["vtk_rows"]
    tasks = {"a": rows.Task(("x", "y"), (1, 2, 2), 2.0), "b": rows.Task(("x", "y"), (1, 2, 2))}
    logits = np.array([[3.0, 1.0]], np.float32)
    sent = request(np.zeros((2, 1, 2, 2), np.float32), ["a", "b"])
    for softmax in (False, True):
        (answer,) = rows.answer([sent], tasks, lambda batches: dict.fromkeys(batches, logits), softmax=softmax)
        wanted = 1 / (1 + np.exp(-np.array([1.0, 2.0])))
        np.testing.assert_allclose(answer.found["score"][:, 0], wanted, rtol=1e-6)
        first = answer.found["probabilities" if softmax else "logits"][:, 0]
        np.testing.assert_allclose(first, wanted if softmax else [3.0, 3.0], rtol=1e-6)


def test_the_index_of_our_python_back_end_has_the_temperature(calibrated: Path, tmp_path: Path) -> None:
    out = tmp_path / "models"
    export_triton(calibrated, TritonConfig(out=out, name="p", backend="python", fuse=False), show=False)
    (task,) = json.loads((out / "p" / "1" / "tasks.json").read_text())["tasks"].values()
    assert task["temperature"] == 1.5
