"""``--softmax`` by the card's temperature, and the output ``unknown`` of ``--threshold auto``."""

import contextlib
import csv
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from tests.export._calibrated import IMAGES, shares
from tests.vtk.test_calibration import GIVEN
from vtk.__main__ import main
from vtk.packs.cards import read_card
from vtk.packs.load import load_task
from vtk_export.graph.opset17 import lower
from vtk_export.graph.unknown import append_unknown


def export(pack: Path, out: Path, *argv: object) -> int:
    return main(["export", "onnx", str(pack), "--out", str(out), "--threads", "1", *map(str, argv)])


def run(folder: Path, feeds: dict[str, np.ndarray], names: list[str] | None = None) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    names = names or [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def test_softmax_is_by_the_temperature_and_logits_stay(calibrated: Path, calm: Any, tmp_path: Path) -> None:
    assert export(calibrated, tmp_path / "p", "--softmax") == 0
    assert export(calibrated, tmp_path / "l") == 0
    feeds = {"pixel_values": IMAGES.numpy()}
    model = calm.model()
    np.testing.assert_allclose(run(tmp_path / "p", feeds)["probabilities"], shares(model), atol=1e-5)
    with torch.no_grad():
        logits = model.double()(IMAGES.double()).numpy()
    np.testing.assert_allclose(run(tmp_path / "l", feeds)["logits"], logits, atol=1e-4 * np.abs(logits).max())


@pytest.mark.parametrize("argv", [(), ("--softmax", "--dtype", "fp16")], ids=["fp32", "fp16-softmax"])
def test_unknown_is_where_the_score_is_below_the_threshold(
    calibrated: Path, calm: Any, tmp_path: Path, argv: tuple[str, ...]
) -> None:
    assert export(calibrated, tmp_path / "out", "--threshold", "auto", *argv) == 0
    kind = np.float16 if "fp16" in argv else np.float32
    found = run(tmp_path / "out", {"pixel_values": IMAGES.numpy().astype(kind)})
    score = shares(calm.model()).max(1)
    card = read_card_of(tmp_path / "out")
    clear = np.abs(score - card["threshold"]["score"]) > (1e-3 if "fp16" in argv else 1e-6)
    wanted = score < card["threshold"]["score"]
    assert found["unknown"].dtype == bool and found["unknown"].shape == (16,) and clear.sum() >= 12
    assert 4 <= wanted.sum() <= 12 and (found["unknown"] == wanted)[clear].all()
    lost = IMAGES.numpy().astype(kind)
    lost[3] = np.nan
    assert run(tmp_path / "out", {"pixel_values": lost})["unknown"][3]
    assert card["threshold"]["risk"] == 0.02 and card["threshold"]["upper"] <= 0.02


def test_opset_17_has_it_too(calibrated: Path, calm: Any, exported_calm: Any) -> None:
    proto = exported_calm.proto
    lower(proto, ir_version=8)
    score = shares(calm.model()).max(1)
    threshold = dataclasses.replace(GIVEN, score=float(np.median(score)))
    append_unknown(proto, dataclasses.replace(read_card(calibrated), threshold=threshold))
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(["unknown"], {"pixel_values": IMAGES.numpy()})
    assert (found == (score < threshold.score)).all() and found.sum() == 8


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_what_hands_nan_on_behind_the_softmax_is_no_second_softmax(runtime: str, calibrated: Path) -> None:
    """As in int8 files, whose quantized products lose an image's NaN."""
    weight = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("IsNaN", ["x"], ["lost"]),
            onnx.helper.make_node("Where", ["lost", "nine", "x"], ["kept"]),
            onnx.helper.make_node("MatMul", ["kept", "w"], ["scores"]),
            onnx.helper.make_node("Softmax", ["scores"], ["shares"], axis=-1),
            onnx.helper.make_node("Where", ["lost", "x", "zero"], ["zeros"]),
            onnx.helper.make_node("ReduceSum", ["zeros", "axes"], ["mark"], keepdims=1),
            onnx.helper.make_node("Add", ["shares", "mark"], ["probabilities"]),
        ],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 4])],
        [onnx.helper.make_tensor_value_info("probabilities", onnx.TensorProto.FLOAT, ["batch", 5])],
        [
            onnx.numpy_helper.from_array(np.array(value, kind), name)
            for name, value, kind in (
                ("w", weight, np.float32), ("zero", 0, np.float32), ("nine", 9, np.float32), ("axes", [1], np.int64),
            )
        ],
    )  # fmt: skip
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    x = np.random.default_rng(1).normal(size=(10, 4)).astype(np.float32)
    shares = np.exp(x.astype(np.float64) @ weight)
    score = (shares / shares.sum(1, keepdims=True)).max(1)
    card = dataclasses.replace(
        read_card(calibrated), threshold=dataclasses.replace(GIVEN, score=float(np.median(score)))
    )
    x[0] = np.nan
    wanted = score < np.median(score)
    wanted[0] = True
    if runtime == "onnxruntime":
        append_unknown(proto, card)
        (found,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(["unknown"], {"x": x})
    else:
        openvino = pytest.importorskip("openvino")
        from vtk_export.openvino import ir

        model = openvino.Core().read_model(proto.SerializeToString())
        ir.append_unknown(model, card, answer="probabilities", shares=True, name="unknown")
        found = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(x)["unknown"]
    assert found.tolist() == wanted.tolist()


def read_card_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "model.json").read_text())["metrics"]


def test_raw_images_other_names_and_int8_have_it_too(calibrated: Path, calm: Any, tmp_path: Path) -> None:
    argv = ("--threshold", "auto", "--with-preproc", "--int8", "dynamic", "--output-name", "unknown=refused",
            "--output-name", "scores")  # fmt: skip
    assert export(calibrated, tmp_path / "out", *argv) == 0
    pixels = np.random.default_rng(0).integers(0, 255, (2, 40, 50, 3), np.uint8)
    found = run(tmp_path / "out", {"images": pixels})
    assert list(found) == ["scores", "refused"] and found["refused"].shape == (2,)
    assert "`refused`: true where" in (tmp_path / "out" / "README.md").read_text()


def test_a_file_says_unknown_in_predict_by_its_own_threshold(
    calibrated: Path, calm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(calibrated, tmp_path / "out", "--threshold", "auto") == 0
    score = read_card_of(tmp_path / "out")["threshold"]["score"]
    for source, argv in ((tmp_path / "out", ()), (calibrated, ("--risk", "0.02"))):
        table = tmp_path / "p.csv"
        more = ["--threshold", "auto", "--out", str(table), *argv]
        assert main(["predict", str(source), str(calm.photos), *more]) == 0
        with table.open() as file:
            lines = list(csv.DictReader(file))
        assert {line["answer"] == "unknown" for line in lines if float(line["score1"]) < score - 1e-6} <= {True}
        assert all(line["answer"] == line["label1"] for line in lines if float(line["score1"]) > score + 1e-6)
    assert "unknown;" in capsys.readouterr().out


def test_a_wrong_unknown_fails_the_gate(
    calibrated: Path, calm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vtk_export.onnx import unknown_gate

    real = unknown_gate.append_unknown

    def faulty(proto: onnx.ModelProto, card: Any) -> None:
        real(proto, card)
        proto.graph.node[-1].op_type = "And"

    monkeypatch.setattr(unknown_gate, "append_unknown", faulty)
    assert export(calibrated, tmp_path / "out", "--threshold", "auto") == 4
    assert "`unknown` is not what the file's own scores say" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("scale", "side"), [(0.0, "unknown"), (50.0, "answered"), (None, "")])
def test_a_gate_whose_images_are_all_on_one_side_says_so(
    scale: float | None, side: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from vtk_export.onnx import unknown_gate

    class Session:
        batch = None

        def run(self, feeds: Any) -> dict[str, torch.Tensor]:
            images = feeds["pixel_values"]
            factors = torch.arange(len(images)) % 2 * 50.0 if scale is None else torch.full((len(images),), scale)
            logits = factors[:, None] * torch.tensor([[1.0, 0.0]]) + 0 * images.flatten(1)[:, :1]
            return {"logits": logits, "unknown": ~(logits.softmax(1).amax(1) >= 0.7)}

    @contextlib.contextmanager
    def sessions() -> Any:
        yield (Session(),)

    card = SimpleNamespace(temperature=1.0, threshold=SimpleNamespace(score=0.7))
    file = SimpleNamespace(facts=SimpleNamespace(verified=True, preprocessing=False))
    given = SimpleNamespace(card=card, images=torch.zeros(6, 3, 2, 2))
    unknown_gate.gate_unknown(file, given, SimpleNamespace(seed=0), sessions)  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert (f"all 6 images are {side}, so the other answer was not tried" in said) if side else "not tried" not in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--risk", "0.1"), "is for --threshold auto"),
        (("--threshold", "auto", "--output", "features"), "applies to logits"),
        (("--threshold", "auto", "--risk", "0.001"), "takes 2302 held-out images at least"),
        (("--threshold", "0.5"), "auto"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    calibrated: Path, calm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], message: str
) -> None:
    assert export(calibrated, tmp_path / "out", *argv) == 2
    assert message in capsys.readouterr().err


def test_a_task_says_unknown_and_its_scores_are_calibrated(calibrated: Path, calm: Any) -> None:
    task = load_task(calibrated)
    plain = task.predict(IMAGES, top_k=1)
    np.testing.assert_allclose([p.scores[0] for p in plain], shares(task.model).max(1), rtol=1e-5)
    assert not any(p.unknown for p in plain) and {p.answer for p in plain} <= set(task.classes)
    task.model.float()
    judged = task.predict(IMAGES, top_k=1, threshold="auto", risk=0.02)
    assert {p.answer for p in judged if p.unknown} == {"unknown"} and 4 <= sum(p.unknown for p in judged) <= 12
