"""The benchmark scripts run and write the rows they promise."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
CONTEXT = {"device", "threads", "python", "torch", "timm", "git", "date"}


def rows(script, *args, results):
    command = [sys.executable, str(BENCHMARKS / script), *map(str, args), "--skip-tests", "--results", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return list(csv.DictReader(results.open()))


@pytest.mark.slow
def test_engine(tmp_path):
    args = ("--rounds", 1, "--steps", 2, "--img-size", 32, "--batch-size", 4, "--depth", 1, "--big-size", 32)
    found = rows("engine.py", *args, results=tmp_path / "engine.csv")
    assert [r["bound"] for r in found] == [">= 0.90", "<= 0.82"]
    assert all(float(r["ratio"]) > 0 and found[0].keys() >= CONTEXT for r in found)


@pytest.mark.slow
def test_policies(photos, tmp_path):
    args = (photos, "--model", "test_vit", "--no-pretrained", "--img-size", 32, "--epochs", 1, "--batch-size", 8,
            "--workers", 0, "--seeds", 0, 1, "--rates", 1e-4, 1e-3)  # fmt: skip
    found = rows("policies.py", *args, results=tmp_path / "policies.csv")
    expected = [("attn", "0"), ("attn", "1")] + [(p, "0") for p in ("full", "ffn", "head") for _ in range(2)]
    assert [(r["policy"], r["seed"]) for r in found] == expected
    assert found[0].keys() >= CONTEXT


@pytest.mark.slow
def test_sam(tmp_path):
    args = ("--model", "test_vit", "--img-size", 32, "--batch-size", 4, "--rounds", 1)
    found = rows("sam.py", *args, results=tmp_path / "sam.csv")
    assert [r["comparison"].partition(" / ")[0] for r in found] == 2 * [
        "sam", "sam, adaptive", "sam, two groups", "adversarial", "sam and adversarial",
    ]  # fmt: skip
    assert all(float(r["ratio"]) > 0 and r["bound"] == "<= 2.1" and r.keys() >= CONTEXT for r in found)
