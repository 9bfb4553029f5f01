"""Exports and back-ends without a package that they need: exit code 5 and a line that installs it, before any work."""

import sys
from pathlib import Path
from typing import Any

import pytest

from vtk.__main__ import main

JOBS: dict[str, tuple[str, ...]] = {
    "onnx": ("export", "onnx", "PACK", "--out", "OUT"),
    "int8": ("export", "onnx", "PACK", "--int8", "dynamic", "--out", "OUT"),
    "tensorrt": ("export", "tensorrt", "PACK", "--out", "OUT"),
    "tasks": ("export", "tasks", "a=PACK", "b=PACK", "--out", "OUT"),
    "triton": ("export", "triton", "PACK", "--out", "OUT"),
    "triton, python": ("export", "triton", "PACK", "--backend", "python", "--out", "OUT"),
    "triton, tensorrt": ("export", "triton", "PACK", "--backend", "tensorrt", "--out", "OUT"),
    "predict": ("predict", "PACK", "PHOTOS", "--backend", "ort-cpu"),
    "profile": ("profile", "PACK", "--backends", "ort-cpu", "--out", "OUT"),
}


@pytest.mark.parametrize("package", ["onnxscript", "onnxruntime"])
@pytest.mark.parametrize("job", JOBS)
def test_a_package_that_is_missing_is_one_line_before_any_work(
    job: str, package: str, packed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    words = {"PACK": str(packed.path), "OUT": str(tmp_path / "out"), "PHOTOS": str(packed.photos)}
    argv = [word if "=" not in word else f"{word[:2]}{packed.path}" for word in JOBS[job]]
    assert main([words.get(word, word) for word in argv]) == 5
    said = capsys.readouterr()
    (line,) = [line for line in said.err.splitlines() if ": error: " in line]
    assert package in line and "pip install" in line
    assert "converting" not in said.out
