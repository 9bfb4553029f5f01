"""benchmarks/gpu.sh: its arguments, the order and the time of its stages, its exit codes, and a whole run in small."""

import os
import subprocess
import sys
from pathlib import Path

import _units
import pytest

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "benchmarks" / "gpu.sh"

STUB = """#!/bin/sh
name=$(basename "$1" .py); shift
echo "$name $*" >> "{log}"
echo "git $VTK_GIT"
case $name in {cases} esac
exit 0
"""


def run(*args, python=sys.executable):
    environment = {k: v for k, v in os.environ.items() if k != "VTK_GIT"} | {"PYTHON": str(python)}
    command = ["bash", str(SCRIPT), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


@pytest.fixture
def stub(tmp_path):
    """Makes an interpreter that writes down what it was asked to run and exits as told."""

    def make(**codes):
        path, log = tmp_path / "python", tmp_path / "calls"
        path.write_text(STUB.format(log=log, cases=" ".join(f"{k}) exit {v} ;;" for k, v in codes.items()) or "-) ;;"))
        path.chmod(0o755)
        return path, log

    return make


def test_without_arguments_it_says_how_to_use_it():
    found, shown = run(), run("--help")
    assert found.returncode == 2 and found.stderr == "gpu.sh: no stage is given; see --help, or give all\n"
    assert shown.returncode == 0 and shown.stdout.startswith("Usage: benchmarks/gpu.sh STAGE[=SECONDS]...")
    assert max(map(len, shown.stdout.splitlines())) <= 80


@pytest.mark.parametrize(("args", "message"), [
    (
        ("serve", "--out", "x"),
        "`serve` is no stage and no option; stages are correct, kernels, e2e, breakdown, train, bank, or all",
    ),
    (("e2e",), "`--out DIR` is missing"),
    (("e2e", "--out"), "`--out` needs a value"),
    (("e2e=fast", "--out", "x"), "`fast` is no number of seconds"),
    (("e2e=0", "--out", "x"), "`0` is no number of seconds"),
    (("all", "--seconds", "9" * 20, "--out", "x"), "no number of seconds (1 to 999999)"),
    (("e2e", "--seconds", "-5", "--out", "x"), "`-5` is no number of seconds"),
])  # fmt: skip
def test_mistakes_are_one_line(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run(*args)
    assert found.returncode == 2 and message in found.stderr and len(found.stderr.splitlines()) == 1
    assert not (tmp_path / "x").exists()


def test_stages_run_in_order_each_with_its_time(stub, tmp_path):
    python, log = stub()
    found = run("e2e=300", "correct", "--seconds", 90, "--out", tmp_path / "out", "--git", "abc1234", python=python)
    assert found.returncode == 0
    out = tmp_path / "out"
    assert log.read_text().splitlines() == [f"e2e --out {out} --seconds 300", f"correct --out {out} --seconds 90"]
    assert "git abc1234" in found.stdout and "== e2e, at most 300 s" in (out / "gpu.log").read_text()


@pytest.mark.parametrize(("codes", "expected"), [
    ({}, 0), ({"kernels": 3}, 3), ({"correct": 1}, 1), ({"correct": 1, "e2e": 3}, 1),
    ({"correct": 3, "kernels": 139}, 1),
])  # fmt: skip
def test_later_stages_run_whatever_earlier_ones_say(stub, tmp_path, codes, expected):
    python, log = stub(**codes)
    stages = ["correct", "kernels", "e2e", "breakdown", "train", "bank"]
    found = run(*stages, "--smoke", "--out", tmp_path / "out", python=python)
    assert found.returncode == expected
    assert [line.split()[0] for line in log.read_text().splitlines()] == stages
    assert all(line.endswith("--smoke") for line in log.read_text().splitlines())


def test_fresh_puts_old_results_aside(stub, tmp_path):
    for name in ("gpu_e2e.csv", "gpu_kernels.csv"):
        (tmp_path / name).write_text("old\n")
    assert run("e2e", "--fresh", "--out", tmp_path, python=stub()[0]).returncode == 0
    assert (tmp_path / "gpu_e2e.csv.old").read_text() == "old\n" and not (tmp_path / "gpu_e2e.csv").exists()
    assert (tmp_path / "gpu_kernels.csv").exists()


@pytest.mark.slow
def test_a_whole_run_in_small(tmp_path):
    found = run("correct", "kernels", "e2e", "breakdown", "--smoke", "--out", tmp_path)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-2000:]
    names = {"gpu.log", "smoke_ceilings.csv", "smoke_correct.csv", "smoke_kernels.csv", "smoke_e2e.csv"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert [line for line in found.stdout.splitlines() if line.endswith(": complete")] == [
        "correct: complete", "kernels: complete", "e2e: complete",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_whole_of_all_in_small(tmp_path):
    found = run("all", "--smoke", "--out", tmp_path)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-2000:]
    names = {"gpu.log", "progress.json", "summary.txt"}
    names |= {f"smoke_{name}.csv" for name in ("ceilings", "correct", "kernels", "e2e", "train", "bank")}
    assert {path.name for path in tmp_path.iterdir()} == names
    page = (tmp_path / "summary.txt").read_text().splitlines()
    assert found.stdout.splitlines()[-len(page) :] == page and len(page) <= 60
    assert "smoke test: these figures say nothing" in page and page[2].startswith("choices    complete")


ABSENT = ("accelerate", "onnx", "onnxruntime", "natsort", "sklearn", "tyro", "tritonclient", "pytriton")
"""Packages that the machine with the card need not have; timm, Triton and pytest it has."""


@pytest.mark.slow
def test_stages_need_no_command_line_package():
    program = f"""
import sys
for name in {ABSENT}:
    sys.modules[name] = None
sys.path.insert(0, {str(SCRIPT.parent)!r})
import bank, breakdown, correct, e2e, one_run, roofline, summary, train
from vtk.fused import fuse
from vtk.models.transforms.context_layers import add_context_broadcast
correct.benches()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_tests_that_need_a_gpu_need_no_such_package_either():
    files = [unit.removeprefix(_units.TESTS) for unit in _units.gpu_tests()]
    program = f"""
import sys
for name in ("natsort", "tyro", "tritonclient", "pytriton"):
    sys.modules[name] = None
import pytest
for file in {files}:
    code = pytest.main(["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", file])
    if code:
        sys.exit(f"{{file}} is not collected: {{code}}")
"""
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPO, env=environment)
    assert done.returncode == 0, done.stderr[-500:] + done.stdout[-2000:]


def test_every_file_with_a_test_that_needs_a_gpu_is_a_unit():
    units = _units.gpu_tests()
    for part in ("fused/test_gpu.py", "bank/test_gpu.py", "test_memory_blocks.py", "test_precision.py"):
        assert any(unit.endswith(part) for unit in units)
    assert set(_units.ALONE) == {
        unit[: len(alone)] for alone in _units.ALONE for unit in units if unit.startswith(alone)
    }
