"""``vtk export tensorrt --profile``: the ONNX file in ONNX Runtime, and with ``--build`` the engine as well."""

import json
from pathlib import Path
from typing import Any

import pytest

from vtk.__main__ import main
from vtk.profiling import export_profile as exported


@pytest.mark.slow
def test_the_onnx_file_is_measured_and_said_not_to_be_tensorrt(
    calm: Any, use_fused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fused()
    monkeypatch.setattr(exported, "SECONDS", 0.02)
    argv = ["export", "tensorrt", str(calm.path), "--out", str(tmp_path), "--threads", "1"]
    assert main([*argv, "--profile", "1,2", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)["profile"]
    assert [c["status"] for c in found["backends"][0]["cells"]] == ["ok", "ok"]
    assert "--build measures the TensorRT engine" in captured.err
    assert (tmp_path / "latency.png").is_file() and found["reference"].startswith("torch fp32 on the CPU of ")
    assert main(argv) == 0
    assert not (tmp_path / "latency.json").exists()  # of the earlier file


def test_a_built_engine_is_measured_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("vtk.runtime.backends.base.check_backend", lambda name: None)
    assert exported.onnx_backends("fp16", engine=True) == ("ort-cpu", "ort-cuda", "tensorrt")
    assert exported.onnx_backends("bf16") == ("ort-cuda",)  # no arithmetic on a CPU


def test_nothing_is_measured_when_nothing_is_written(calm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "tensorrt", "x.onnx", "--lint", "--profile", "1"]) == 2
    assert "leave out --out, --build and --profile" in capsys.readouterr().err
