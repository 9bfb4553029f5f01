"""The page that sums a run up: figures beside predictions, floors and bounds, on 60 lines of 80 columns."""

import csv

import _bounds
import _rows
import pytest
import summary
from _plan import STEPS, Outcome

RUN = {"device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "git": "abc1234", "date": "2026-01-01 10:00 UTC"}

CELL = ("S18x2", "224", "1", "after")


@pytest.fixture(autouse=True)
def commit(monkeypatch):
    monkeypatch.setattr(_rows, "code_version", lambda: "abc1234")


def write(folder, name, *rows):
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def e2e(model, batch, provider, ms, px=224, **changes):
    row = {"model": model, "px": str(px), "batch": str(batch), "provider": provider, "median_ms": str(ms),
           "images_s": f"{1e3 * batch / ms:.1f}", "floor_ms": "0.0351", "passed": "True"}  # fmt: skip
    return row | RUN | changes


def line(page, start):
    return next(text for text in page if text.startswith(start))


def test_what_nobody_measured_is_called_so(tmp_path):
    page = summary.lines(tmp_path)
    assert page[0] == "commit abc1234: not measured" and len(page) <= 60
    for model, px, batch in _bounds.LATENCIES:
        text = line(page, f"{model:<6} {px} b{batch} ")
        assert "not measured" in text and "met" not in text and "MISSED" not in text
    assert "GPU tests passed, by file: not measured; comparisons that held: not measured" in page
    assert line(page, "step, ms") == "step, ms: not measured; bound >= 1.15"
    assert line(page, "bank") == "bank: not measured" and line(page, "S/16  compile").count("not yet") == 4


def test_each_figure_is_beside_its_prediction_floor_and_bound(tmp_path):
    with (_rows.RESULTS / _bounds.PREDICTIONS).open(newline="") as file:
        wanted = {
            (r["model"], r["px"], r["batch"], r["provider"], r["form"]): float(r["ms"]) for r in csv.DictReader(file)
        }
    fused, folded = (wanted["S18x2", "224", "1", p, "after"] for p in ("fused+graph", "folded+graph"))
    write(tmp_path, "gpu_e2e.csv", e2e("S18x2", 1, "fused+graph", 0.47), e2e("S18x2", 1, "folded+graph", 0.44),
          e2e("S/16", 1, "fused+graph", 0.33), e2e("S18x2", 256, "fused+graph", 16.1),
          e2e("B/16", 256, "fused+graph", 17.0), e2e("B18x2", 1, "fused+graph", 1, median_ms=""))  # fmt: skip
    page = summary.lines(tmp_path)
    assert page[0] == "NVIDIA H200, torch 2.11.0, Triton 3.6.0, commit abc1234, 2026-01-01 10:00 UTC"
    assert line(page, "S18x2  224 b1 ").split() == [
        "S18x2", "224", "b1", "folded", "0.44", f"{folded:.3g}", f"{0.44 / folded - 1:+.0%}", "0.0351", "<=", "0.45",
        "met",
    ]  # fmt: skip
    assert folded != fused
    assert line(page, "S/16   224 b1 ").endswith("<= 0.32    MISSED")
    assert line(page, "S18x2  224 b256").endswith(">= 16000/s MISSED")
    assert line(page, "B/16   224 b256").endswith(">= 15000/s met")
    assert "wrong output" in line(page, "B18x2  224 b1 ")


def test_ratios_have_their_bounds_and_the_quicker_form_counts(tmp_path):
    rows = [e2e("S18x2", b, "fused+graph", 1.0) for b in (1, 8, 64)] + [e2e("S18x2", 8, "folded+graph", 0.5)]
    rows += [e2e("S18x2", b, _bounds.COMPILED, ms) for b, ms in ((1, 1.19), (8, 0.51), (64, 0.99))]
    rows += [e2e("S18x2", 1, "timm+graph", 1.19)]
    write(tmp_path, "gpu_e2e.csv", *rows)
    page = summary.lines(tmp_path)
    assert line(page, "S18x2 compile").split() == [
        "S18x2", "compile", "b1", "1.19", "MISSED", "b8", "1.02", "met", "b64", "0.99", "MISSED", "b256", "not",
        "yet",
    ]  # fmt: skip
    assert line(page, "S18x2 timm").split()[2:5] == ["b1", "1.19", "met"]


def test_a_training_step_is_held_against_compiled_full_fine_tuning(tmp_path):
    configs = (
        ("full, compiled", 61, 9000), ("full, compiled, graph", 60, 10_000), ("full, AMP", 10, 1),
        ("attn, plain", 50, 6000), ("attn, minimal", 55, 4600), ("attn, by torch", 45, 5000),
    )  # fmt: skip
    rows = [{"model": "B/16", "config": c, "step_ms": str(ms), "peak_mb": str(mb), "passed": "True"} | RUN
            for c, ms, mb in configs]  # fmt: skip
    write(tmp_path, "gpu_train.csv", *rows)
    page = summary.lines(tmp_path)
    assert line(page, "step, ms") == "step, ms: 50, full 60: 1.20, predicted 1.25 at most, >= 1.15 met"
    assert line(page, "step, MB") == "step, MB: 4600, full 10000: 0.46, <= 0.45 of it MISSED"
    write(tmp_path, "smoke_train.csv", *rows)
    assert not [text for text in summary.lines(tmp_path, smoke=True) if " met" in text or "MISSED" in text]
    write(tmp_path, "gpu_train.csv", *rows[2:])
    assert line(summary.lines(tmp_path), "step, ms") == (
        "step, ms: 50, compiled full fine-tuning not measured; bound >= 1.15"
    )


def test_rows_of_another_commit_do_not_count(tmp_path):
    write(tmp_path, "gpu_e2e.csv", e2e("S18x2", 1, "fused+graph", 0.1, git="0ld0ld0"))
    page = summary.lines(tmp_path)
    assert page[0] == "commit abc1234: not measured" and "not measured" in line(page, "S18x2  224 b1 ")


@pytest.mark.parametrize("left", [b"\xff\xfe\n", b"", b"a\nb,c\n", b"model,git\nx\n", b"git\x00\nabc1234\n", None])
def test_what_cannot_be_read_is_not_measured(tmp_path, left):
    for stage in ("e2e", "kernels", "correct", "train", "bank", "breakdown"):
        path = tmp_path / f"gpu_{stage}.csv"
        path.mkdir() if left is None else path.write_bytes(left)
    (tmp_path / "choices.json").write_bytes(left or b"[" * 10**5)
    assert line(summary.lines(tmp_path), "bank") == "bank: not measured"


def test_a_page_of_everything_keeps_its_size_and_says_what_failed(tmp_path):
    providers = ("timm", "timm+graph", "fused", "fused+graph", "folded+graph", _bounds.COMPILED)
    cells = {*summary.CELLS, *((m, 224, b) for m in _bounds.TUNED for b in (1, 8, 64, 256))}
    found = (e2e(m, b, p, 123.4567, px, passed=str(p != "timm")) for m, px, b in cells for p in providers)
    write(tmp_path, "gpu_e2e.csv", *found)
    tests = {"dtype": "", "note": "3 failed" + 99 * ".", "passed": "False"} | RUN
    write(tmp_path, "gpu_correct.csv", *({"unit": f"pytest tests/{i}.py", "case": "-m gpu"} | tests for i in range(90)))
    bank = {"model": "B/16", "px": "224", "images": "1"} | RUN
    write(tmp_path, "gpu_bank.csv", *(bank | {"tasks": t, "provider": p, "ms": ms} for t in ("16", "64", "8")
          for p, ms in (("bank fused+graph", "1.5"), ("fused+graph", "6.0"))))  # fmt: skip
    outcomes = [Outcome(step, code, 123.0) for step, code in zip(STEPS, (0, 1, 3, 3, 3, 3, 139), strict=True)]
    page = summary.lines(tmp_path, outcomes)
    assert len(page) == 60 and all(len(text) <= 80 for text in page)
    assert sum(text.endswith(("met", "MISSED")) for text in page) >= len(_bounds.LATENCIES)
    assert f"FAILED {90 + len(cells)}:" in page and any(
        t.startswith("  correct: pytest tests/0.py -m gpu  3 failed...") for t in page
    )
    assert "bank, 16 tasks × 1: 1.5 ms, 4.00 × as fast as a model for each" in page
    assert "bank       ended with 139     123 s" in page
    assert not any(text.endswith(("ME", "MISS", "m", "MI")) for text in page if " b" in text)


def test_it_is_printed_by_itself(tmp_path, capsys):
    assert summary.main(["--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == summary.lines(tmp_path)
