"""``vtk export onnx --profile``."""

import json
from pathlib import Path

import onnx
import pytest

from vtk.__main__ import main
from vtk.profiling.onnx_work import work_of_onnx
from vtk.profiling.result import ProfileResult
from vtk.profiling.work import work_of


def test_latency_is_left_beside_the_file_and_goes_with_the_next_export(
    packed, fake_exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_exporter()
    monkeypatch.setattr("vtk.commands._export_profile.SECONDS", 0.05)
    out = tmp_path / "onnx"
    argv = ["export", "onnx", str(packed.path), "--out", str(out), "--threads", "1", "--json"]
    assert main([*argv, "--profile", "1,3"]) == 0
    found = json.loads(capsys.readouterr().out)["profile"]
    assert sorted(p.name for p in out.iterdir()) == ["latency.json", "latency.png", "model.json", "model.onnx"]
    result = ProfileResult.read(out / "latency.json")
    cells = [(b.name, c.batch, c.status) for b, c in result.cells() if b.name == "ort-cpu"]
    assert cells == [("ort-cpu", 1, "ok"), ("ort-cpu", 3, "ok")]
    assert found["backends"][0]["name"] == "ort-cpu" and result.threads == 1
    assert result.reference.startswith("torch fp32 on the CPU of ")  # not the file itself
    assert main(argv) == 0
    assert sorted(p.name for p in out.iterdir()) == ["model.json", "model.onnx"]


@pytest.mark.parametrize("flags,said", [
    (["--profile", "0"], "`--profile` 0"),
    (["--profile", "1", "--with-preproc"], "takes raw images"),
    (["--profile", "1", "--output", "features"], "gives no logits"),
])  # fmt: skip
def test_what_cannot_be_measured_is_said_before_the_export(
    flags: list[str], said: str, packed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "onnx", str(packed.path), "--out", str(tmp_path / "x"), *flags]) == 2
    assert said in capsys.readouterr().err


def test_work_of_the_file_is_that_of_the_model(packed, exported) -> None:
    shape = (3, 32, 48)
    counted, expected = work_of_onnx(exported.out / "model.onnx"), work_of(packed.model(), shape, 5)
    assert counted is not None and expected is not None
    assert counted.flops == expected.flops and counted.values == expected.values
    # the exporter folds some of the small ones into others, and adds constants
    assert counted.parameters == pytest.approx(expected.parameters, rel=0.01)


def test_work_of_a_fused_operator_is_not_guessed(exported, tmp_path: Path) -> None:
    proto = exported.proto
    proto.graph.node[0].domain = "com.microsoft"
    onnx.save(proto, tmp_path / "m.onnx")
    assert work_of_onnx(tmp_path / "m.onnx") is None
