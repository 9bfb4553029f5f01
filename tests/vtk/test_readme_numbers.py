"""Every number in README's table of measurements follows from the rows of benchmarks/results."""

import csv
import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
S18X2 = {"model": "S18x2", "px": "224", "dtype": "bfloat16", "git": "fd6ca4a"}
VIT_S = {"model": "vit_small_patch16_224", "comparison": "time of a run", "side": "fp32", "of": "torch.onnx"}


def rows(file: str, **values: str) -> list[dict[str, str]]:
    """Return the rows of a result file with these values."""
    with (REPO / "benchmarks" / "results" / file).open(newline="", encoding="utf-8") as lines:
        found = [row for row in csv.DictReader(lines) if values.items() <= row.items()]
    assert found, (file, values)
    return found


def cells() -> list[list[str]]:
    """Return the rows of README's table as what, result and machine."""
    text = (REPO / "README.md").read_text("utf-8")
    (table,) = re.findall(r"^\| what \| result \| machine \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)
    return [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table.splitlines()]


def results() -> list[tuple[str, str]]:
    """Compute result and machine of each row of the table, in order."""
    policies = {name: rows("policies.csv", policy=name) for name in ("attn", "full")}
    attention = [float(row["top1"]) for row in policies["attn"]]
    assert len(attention) == 3 and {row["lr"] for row in policies["attn"]} == {"0.0001"}
    step = rows("engine.csv", comparison="attn / full, time of a step")[-1]
    onnx = [float(rows("export_cpu.csv", batch=batch, **VIT_S)[-1]["ratio"]) for batch in ("1", "8")]
    ms = {
        (side, batch): float(rows("gpu_e2e.csv", provider=f"{side}+graph", batch=batch, **S18X2)[-1]["median_ms"])
        for side in ("fused", "timm") for batch in ("1", "64")
    }  # fmt: skip
    ours, theirs = (f"{ms[side, '1']:.2f} / {ms[side, '64']:.1f} ms" for side in ("fused", "timm"))
    cpu = "2 CPU cores"
    devices = {r["device"] for r in [*policies["attn"], *policies["full"], step]}
    assert devices == {"AMD EPYC, 2 cores"} and rows("gpu_e2e.csv", **S18X2)[-1]["device"] == "NVIDIA H200"
    return [
        (f"{sum(attention) / 3:.3f}", cpu), (f"{max(float(row['top1']) for row in policies['full']):.3f}", cpu),
        (f"{float(step['ratio']):.2f} of the time", cpu), (f"{onnx[0]:.2f} / {onnx[1]:.2f} of the time", cpu),
        (f"{ours} against {theirs}", "H200, an earlier commit"),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(5))
def test_a_row_of_the_table_is_measured(number: int) -> None:
    assert len(cells()) == 5
    assert tuple(cells()[number][1:]) == results()[number]
