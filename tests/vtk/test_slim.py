"""Smaller environments do their jobs: in a process of its own, with what their requirements do not bring blocked."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
EXPECTED = {"bank": {"onnx", "peft", "sklearn"}, "train": {"onnx", "peft"}, "cpu-server": {"peft"}}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_a_slim_environment_does_its_jobs(name: str, tmp_path: Path) -> None:
    here = shutil.copytree(TESTS / "fixtures" / "v0_1", tmp_path / "user")
    requirements = TESTS.parent / "requirements" / f"{name}.txt"
    command = [sys.executable, str(TESTS / "vtk" / "_slim.py"), str(requirements)]
    done = subprocess.run(command, cwd=here, env={**os.environ}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.rpartition("modules, ")[2].strip().split(", ")) == EXPECTED[name]
