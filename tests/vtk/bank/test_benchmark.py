"""The benchmark's script, in small."""

import csv
import importlib
import sys
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).resolve().parents[3] / "benchmarks")


def test_the_stage_in_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, FOLDER])
    assert importlib.import_module("bank").main(["--out", str(tmp_path), "--smoke"]) == 0
    assert capsys.readouterr().out.endswith("bank: complete\n")
    with (tmp_path / "smoke_bank.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["provider"] for row in rows] == [
        "bank", "bank fused", "bank fused, half of it paged in", "timm", "fused+graph",
        "bank factors", "bank int8 factors", "one model, fused+graph",
    ]  # fmt: skip
    assert float(rows[6]["weights_bytes"]) < float(rows[5]["weights_bytes"])
    assert float(rows[0]["weights_bytes"]) < float(rows[3]["weights_bytes"])
