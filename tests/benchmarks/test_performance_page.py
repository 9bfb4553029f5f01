"""docs/_generate/performance.py: every number is from a result file, and the page is the same every time."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import performance
import pytest

RUN = {
    "device": "Card A", "threads": "8", "python": "3.12", "torch": "2.11.0", "timm": "1.0.31", "git": "abc1234",
    "date": "2026-01-01 10:00 UTC", "triton": "3.6.0", "driver": "580.1",
}  # fmt: skip


def write(folder, name, *rows):
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def e2e(model, batch, provider, median, **changes):
    row = {"model": model, "px": "224", "batch": str(batch), "provider": provider, "dtype": "bfloat16", "runs": "1000",
           "median_ms": str(median), "p99_ms": "", "images_s": f"{1e3 * batch / median:.1f}", "peak_mb": "10",
           "error": "1e-3", "torch_error": "1e-3", "passed": "True", "floor_ms": "0.043", "ceilings": "measured",
           "bound": ""}  # fmt: skip
    return row | RUN | changes


def test_without_results_the_page_says_so_and_has_no_number(tmp_path):
    page = performance.page(tmp_path)
    assert page.count("Not yet measured.") == len(performance.SECTIONS)
    text = re.sub(r"```.*?```|`[^`]*`", "", page, flags=re.S)
    assert not re.search(
        r"\d\s*(ms|µs|us|s|images|GB|TFLOP|×|x|%)\b|\d\.\d", re.sub(r"\b[SB](18x2|36x1|/16)", "", text)
    )


def test_numbers_of_the_page_are_those_of_the_files(tmp_path):
    write(tmp_path, "gpu_e2e.csv", e2e("S18x2", 1, "fused+graph", 0.5, bound="<= 0.55 ms", p99_ms="0.61"),
          e2e("S36x1", 1, "fused+graph", 0.9), e2e("S18x2", 256, "fused+graph", 20.0, bound=">= 16000 images/s"),
          e2e("S18x2", 1, "timm", 5.25), e2e("S18x2", 8, "fused", 1.5, median_ms="", images_s=""))  # fmt: skip
    page = performance.page(tmp_path)
    assert "| batch | timm | fused | fused+graph | folded+graph | floor |" in page
    assert "| 1 | 5.25 | – | 0.5 (0.61) | not yet measured | 0.043 (measured) | 2000 | 23256 |" in page
    assert "| 8 | – | wrong output | – | not yet measured | 0.043 (measured) | – | 186047 |" in page
    assert "| 1 | 0.9 | 0.043 (measured) | 1111 | 23256 |" in page  # S36x1 is measured in one form only
    assert "set for an H200; these are of Card A" in page and "**Card A**" in page
    assert "| S18x2, 224 px, batch 1, fused+graph | <= 0.55 ms | 0.5 | 0.043 ms | met |" in page
    assert "| S18x2, 224 px, batch 256, fused+graph | >= 16000 images/s | 12800 | 0.043 ms | **missed** |" in page
    assert "| S18x2 against S36x1, 224 px, batch 1, fused+graph | >= 1.00 × | 1.80 | 0.043 ms | met |" in page
    assert "*Card A; threads 8; torch 2.11.0; triton 3.6.0; timm 1.0.31; driver 580.1; commit abc1234; 2026-" in page


def test_both_forms_have_their_columns_and_rows(tmp_path):
    write(tmp_path, "gpu_e2e.csv", *(e2e("B/16", 8, p, ms) for p, ms in (("folded+graph", 0.9), ("fused+graph", 1.0),
          ("timm", 3.0), ("compile (blocks)", 2.0))))  # fmt: skip
    write(tmp_path, "launches.csv", *({"model": m, "kernels": k, "bound": b} | RUN
          for m, k, b in (("S18x2", "130", "<= 130"), ("S18x2, folded", "95", "<= 95"))))  # fmt: skip
    cell = {"model": "B/16", "px": "224", "batch": "1", "kernel": "gaps", "calls": "0", "us": "5", "percent": "100"}
    write(tmp_path, "gpu_breakdown.csv", cell | RUN)
    page = performance.page(tmp_path)
    assert "| batch | timm | fused+graph | folded+graph | compile (blocks) |" in page
    assert "| 8 | 3.0 | 1.0 | 0.9 | 2.0 | 0.043 (measured) | 8889 |" in page
    assert "| S18x2, folded | 95 | <= 95 |" in page and "| B/16, folded | not yet measured | <= 65 |" in page
    assert "Folded models: not yet measured." in page
    write(tmp_path, "gpu_breakdown.csv", cell | RUN, cell | RUN | {"model": "B/16, folded"})
    page = performance.page(tmp_path)
    assert "| B/16, folded | 224 | 1 |" in page and "Folded models" not in page


def test_the_last_row_of_a_cell_counts_and_devices_are_apart(tmp_path):
    write(tmp_path, "gpu_ceilings.csv", *({"what": "copy", "value": v, "unit": "GB/s", **RUN, "device": d}
          for v, d in (("2900", "Card A"), ("3000", "Card A"), ("4000", "Card B"))))  # fmt: skip
    page = performance.page(tmp_path)
    assert "| copy | 3000 | GB/s |" in page and "2900" not in page
    assert page.index("| copy | 4000 | GB/s |") < page.index("*Card B;") and "*Card A;" in page


def test_kernels_and_comparisons_have_their_tables(tmp_path):
    row = {"op": "norm", "mode": "forward", "shape": "B=1", "dtype": "bf16", "percent": "55.5"}
    times = (("eager", "4.5", "launch"), ("vtk", "2.5", "graph"))
    cells = [row | {"provider": p, "p50_us": t, "timer": by} | RUN for p, t, by in times]
    write(tmp_path, "gpu_kernels.csv", *cells)
    row = {"unit": "op norm", "dtype": "bf16", "torch_error": "2e-3", "note": ""} | RUN
    found = (("a", "1e-3", "True"), ("b", "3e-3", "True"), ("c", "", "False"))
    write(tmp_path, "gpu_correct.csv", *(row | {"case": c, "error": e, "passed": p} for c, e, p in found))
    page = performance.page(tmp_path)
    assert "| shape | mode | type | eager | vtk |" in page
    assert "| B=1 | forward | bf16 | 4.5 (55.5 %) *launch* | 2.5 (55.5 %) |" in page
    assert "| op norm | 2 of 3 | 3e-3 | 2e-3 |" in page


def test_the_time_of_kernels_is_shown_by_group(tmp_path):
    cell = {"model": "S18x2", "px": "224", "batch": "1", "calls": "1", "percent": "0"}
    times = (("nvjet_sm90_splitK", "40"), ("_norm_kernel", "10"), ("_add_norm_kernel", "20"), ("gaps", "10"))
    write(tmp_path, "gpu_breakdown.csv", *(cell | {"kernel": k, "us": us} | RUN for k, us in times))
    page = performance.page(tmp_path)
    head = (
        "| model | px | batch | matrix products | attention | GELU | norms | patch embedding | other | gaps | sum, µs |"
    )
    assert head in page and "| S18x2 | 224 | 1 | 50.0 | 0.0 | 0.0 | 37.5 | 0.0 | 0.0 | 12.5 | 80 |" in page


def test_cpu_rows_appear_with_their_bounds(tmp_path):
    row = {
        "comparison": "timm / fused", "case": "S18x2, batch 1", "sequential": "300", "parallel": "290",
        "fused": "250", "unit": "ms", "ratio": "1.16", "bound": ">= 1.12", "rounds": "9",
    }  # fmt: skip
    write(tmp_path, "fused_cpu.csv", row | {k: v for k, v in RUN.items() if k not in ("triton", "driver")})
    write(tmp_path, "launches.csv", {"model": "S18x2", "kernels": "131", "bound": "<= 131"} | RUN)
    page = performance.page(tmp_path)
    assert "| timm / fused | S18x2, batch 1 | 300 | 290 | 250 | ms | 1.16 | >= 1.12 | 9 |" in page
    assert "| S18x2 | 131 | <= 131 |" in page


def test_the_page_is_the_same_every_time(tmp_path):
    write(
        tmp_path,
        "gpu_e2e.csv",
        *(e2e(m, b, p, 1.5) for m in ("B18x2", "S18x2") for b in (64, 2) for p in ("timm", "fused")),
    )
    assert performance.page(tmp_path) == performance.page(tmp_path)


def test_check_compares_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(performance, "PAGE", tmp_path / "performance.md")
    monkeypatch.setattr(sys, "argv", ["performance.py"])
    assert performance.main() == 0
    monkeypatch.setattr(sys, "argv", ["performance.py", "--check"])
    assert performance.main() == 0
    performance.PAGE.write_text("edited")
    assert performance.main() == 1 and "make docs" in capsys.readouterr().err


def test_the_committed_page_is_current():
    script = Path(performance.__file__)
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", ["fused_cpu.py", "launches.py", "gpu.sh", "roofline.py"])
def test_scripts_that_the_page_names_exist(script):
    assert script in performance.page()
    assert (performance.RESULTS.parent / script).exists()
