"""The stages of benchmarks/gpu.sh on a CPU: what they judge, what they leave out, and that a cut one goes on."""

import csv
import importlib.util
import sys
from pathlib import Path

import _choices
import _units
import correct
import e2e
import pytest
import torch
from _store import Deadline, Store

from vtk_kernels import choices

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KEYS = {"kernels": ("op", "mode", "provider", "shape", "dtype"), "e2e": e2e.KEY}


def stage(name):
    """Load a stage without taking its plain name: ``kernels`` is also a package of others."""
    spec = importlib.util.spec_from_file_location(f"vtk_benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["kernels", "e2e"])
def test_a_stage_cut_after_three_rows_goes_on_without_doing_any_twice(name, tmp_path, monkeypatch, capsys):
    module = stage(name)
    argv = ["--out", str(tmp_path), "--smoke"]
    real, path = Store.add, tmp_path / f"smoke_{name}.csv"

    def cut(self, row):
        if self.path == path and len(self.rows) == 3:
            raise KeyboardInterrupt
        real(self, row)

    monkeypatch.setattr(Store, "add", cut)
    with pytest.raises(KeyboardInterrupt):
        module.main(argv)
    before = path.read_text()
    assert len(rows(path)) == 3
    monkeypatch.setattr(Store, "add", real)
    assert module.main(argv) == 0
    assert path.read_text().startswith(before)
    keys = [tuple(row[k] for k in KEYS[name]) for row in rows(path)]
    assert len(set(keys)) == len(keys) > 3
    assert module.main(argv) == 0 and len(rows(path)) == len(keys)
    assert "complete" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["correct", "kernels", "e2e"])
def test_a_stage_without_time_says_what_is_missing(name, tmp_path, capsys):
    assert stage(name).main(["--out", str(tmp_path), "--smoke", "--seconds", "0"]) == 3
    assert "missing" in capsys.readouterr().out
    assert not (tmp_path / f"smoke_{name}.csv").exists()


def test_the_stage_correct_holds_for_a_kernel_and_a_model(tmp_path):
    assert correct.main(["--out", str(tmp_path), "--smoke", "--only", "op norm", "model S18x2"]) == 0
    found = rows(tmp_path / "smoke_correct.csv")
    assert [(r["unit"], r["passed"]) for r in found] == [("op norm", "True")] + [("model S18x2", "True")] * 4
    assert [r["case"] for r in found[1:]] == ["logits", "NaN-filled", "folded: logits", "folded: NaN-filled"]


@pytest.mark.slow
def test_the_stage_correct_holds_for_everything(tmp_path):
    assert correct.main(["--out", str(tmp_path), "--smoke"]) == 0
    assert {r["unit"] for r in rows(tmp_path / "smoke_correct.csv")} == set(correct.units(True))


def test_the_rule_of_errors():
    exact = torch.linspace(-2, 2, 1000, dtype=torch.float64)
    plain = exact.to(torch.bfloat16)

    def passed(ours):
        return correct.judge(("op", "case", "bf16"), (ours,), (plain,), (exact,))["passed"]

    assert passed(plain) and passed((exact * (1 + 1e-4)).to(torch.bfloat16))
    wrong = plain.clone()
    wrong[500] += 0.1  # one element of many: the norm hardly sees it
    assert not passed(wrong)
    assert not passed((exact * 1.02).to(torch.bfloat16))
    assert not passed(torch.full_like(plain, torch.nan))
    assert not passed(plain.float()) and not passed(plain[:-1])
    assert not correct.judge(("op", "case", "bf16"), (), (plain,), (exact,))["passed"]


def test_memory_that_nobody_writes_becomes_nan():
    found = correct.filled_with_nan(lambda: (torch.empty(3),))[0]
    assert found.isnan().all() and not torch.are_deterministic_algorithms_enabled()


def test_a_unit_that_raises_leaves_a_failed_row_for_each_of_its_keys(monkeypatch):
    monkeypatch.setattr(correct, "check_model", lambda *args: iter([{}["no such key"]]))
    found = correct.run_unit("model S18x2", torch.device("cpu"), True)
    cases = ("logits", "NaN-filled", "folded: logits", "folded: NaN-filled")
    assert [(r["case"], r["passed"]) for r in found] == [(case, False) for case in cases]
    assert found[0]["note"] == "KeyError: 'no such key'"


def test_units_run_in_processes_of_their_own(tmp_path, capsys):
    programs = {
        "good": "import json; open(PATH, 'w').write(json.dumps([{'passed': True, 'unit': 'good'}]))",
        "dies": "import sys; sys.stderr.write('illegal memory access\\n'); sys.exit(7)",
        "hangs": "import time; time.sleep(60)",
    }
    owed = {name: [(name, "case", "bf16")] for name in programs}
    found = []
    deadline = Deadline(2)
    _units.run_units(
        owed, 3, deadline, tmp_path, found.append, correct.failure,
        lambda unit, path: [sys.executable, "-c", f"PATH = {str(path)!r}; {programs[unit]}"],
    )  # fmt: skip
    assert {r["unit"]: r["passed"] for r in found} == {"good": True, "dies": False}
    assert "ended with 7: illegal memory access" in next(r["note"] for r in found if r["unit"] == "dies")
    assert deadline.missing == ["hangs"]


def test_nothing_of_an_operation_whose_comparisons_fail_is_measured(tmp_path, monkeypatch, capsys):
    module = stage("kernels")
    monkeypatch.setattr(module, "is_green", lambda op, *args: op != "norm")
    assert module.main(["--out", str(tmp_path), "--smoke"]) == 1
    found = {row["op"] for row in rows(tmp_path / "smoke_kernels.csv")}
    assert "norm" not in found and "add_norm" in found
    assert "FAILED norm: its comparisons fail" in capsys.readouterr().out


def test_a_wrong_model_is_not_timed(tmp_path, monkeypatch):
    real = e2e.Subject.provider

    def off_by_a_percent(self, name, images):
        run = real(self, name, images)
        return (lambda x: 1.01 * run(x)) if name == "fused" else run

    monkeypatch.setattr(e2e.Subject, "provider", off_by_a_percent)
    assert e2e.main(["--out", str(tmp_path), "--smoke"]) == 1
    found = {(r["provider"], r["passed"], bool(r["median_ms"])) for r in rows(tmp_path / "smoke_e2e.csv")}
    assert found == {("timm", "True", True), ("fused", "False", False)}


@pytest.mark.parametrize("where", ["build", "provider"])
def test_a_model_that_raises_leaves_the_other_rows(tmp_path, monkeypatch, capsys, where):
    real = {name: getattr(e2e.Subject, name) for name in ("__init__", "provider")}
    name = "__init__" if where == "build" else where
    calls = []

    def raises_at_first(self, *args):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("no memory")
        return real[name](self, *args)

    monkeypatch.setattr(e2e.Subject, name, raises_at_first)
    assert e2e.main(["--out", str(tmp_path), "--smoke"]) == 1
    found = [r["batch"] for r in rows(tmp_path / "smoke_e2e.csv")]
    assert found == (["2", "2"] if where == "build" else ["1", "2", "2"])
    assert "RuntimeError: no memory" in capsys.readouterr().out


def test_the_plan_of_whole_models_is_the_one_of_the_issue():
    plan = e2e.cells(False, True)
    keys = [tuple(key.values()) for cell in plan for key in cell.keys()]
    assert len(set(keys)) == len(keys)
    four = {(m, px, b) for m, px, b, p in keys if p == "fused+graph"}
    later = ("DINOv3 S/16", "DINOv3 B/16", "EVA-02 B/14")
    assert {k for k in four if k[0] in later} == {(m, 224 if "EVA" in m else 256, b) for m in later for b in (1, 8, 64)}
    assert len(four) == 7 * 8 + 3 * 3 and ("B/16", 384, 256) in four and ("B36x1", 224, 2) in four
    assert {k[:3] for k in keys if k[3] == "timm"} == four == {k[:3] for k in keys if k[3] == "timm+graph"}
    folded = {k[:3] for k in keys if k[3] == "folded+graph"}
    assert folded == {k for k in four if k[0] in ("S18x2", "B18x2", "B/16", "S/16", *later)}
    assert len(folded) == 5 * 8 + 3 * 3
    compiled = {(m, b) for m, _, b, p in keys if p == "compile (blocks)"}
    assert compiled == {(m, b) for m in ("S18x2", "S36x1", "B/16") for b in (1, 8, 64)}
    tuned = [(k[0], k[2]) for k in keys if "max-autotune" in k[3]]
    assert sorted(tuned) == sorted((m, b) for m in ("S18x2", "S/16", "B/16") for b in (1, 8, 64, 256))
    assert set(e2e.BOUNDS) <= set(keys)


def test_batch_1_comes_first_then_what_torch_tunes_then_large_batches():
    plan = e2e.cells(False, True)
    subjects = e2e.SUBJECTS
    assert len(subjects) == 10 and ("DINOv3 B/16", 256) in subjects and ("B/16", 384) in subjects
    assert [(c.model, c.px, c.batch, e2e.FUSED_GRAPH in c.providers) for c in plan[:10]] == [
        (*s, 1, True) for s in subjects
    ]
    assert [(c.model, c.batch, c.providers) for c in plan[10:13]] == [
        (model, 1, (e2e.MAX_GRAPH,)) for model in ("S18x2", "S/16", "B/16")
    ]
    large = [(*s, batch) for s in subjects for batch in ((64,) if "DINO" in s[0] or "EVA" in s[0] else (64, 256))]
    assert [(c.model, c.px, c.batch) for c in plan[13:30]] == large
    assert [(c.model, c.px, c.batch) for c in plan[30:40]] == [(*s, 8) for s in subjects]
    assert {c.providers[0] for c in plan[40:49]} == {e2e.MAX_GRAPH}
    assert {c.providers[0] for c in plan[49:58]} == {e2e.COMPILED} and {c.batch for c in plan[58:]} == {2, 4, 16, 32}


def test_plain_timm_is_timed_more_briefly_at_large_batches():
    found = [e2e.duration_of(*a, 0.3) for a in (("timm", 64), ("timm", 8), ("fused", 64))]
    assert found == [0.2, 0.3, 0.3] and e2e.duration_of("timm", 64, 0.01) == 0.01


class Replays:
    """A fused model whose graphs return what they are told."""

    def __init__(self, replay):
        self.graphs, self.replay = False, replay

    def __call__(self, x):
        return self.replay(x) if self.graphs else 2 * x


def test_replays_repeat_themselves_and_agree_with_the_plain_path():
    torch.manual_seed(0)
    images = torch.randn(8, 10).half()
    exact = 2 * images.double()

    def check(replay, plain=2 * images):
        return correct._replay("model x", "fp16", Replays(replay), images, plain, exact)

    same = check(lambda x: 2 * x)
    assert (same["passed"], same["note"], same["case"]) == (True, "", "graph replay")
    other = check(lambda x: (2.001 * x.float()).half())  # another algorithm in the capture
    assert other["passed"] and "e-04 from the plain path" in other["note"] and "fp64" not in other["note"]
    wrong = check(lambda x: 2.1 * x)
    assert not wrong["passed"] and "5.0e-02 from the plain path, and too far from fp64" in wrong["note"]
    assert check(lambda x: 2.1 * x, plain=2.1 * images)["passed"]  # as near to fp64 as plain torch
    stale = images[:1]
    assert not check(lambda x: 2 * (stale if len(x) == 1 else x))["passed"]
    drift = iter(range(100))
    unsteady = check(lambda x: 2 * x + 1e-3 * next(drift))
    assert not unsteady["passed"] and "replays of the same input differ" in unsteady["note"]


def test_choices_are_the_quickest_of_what_was_measured_completely(tmp_path, code):
    benches = correct.benches()
    bench = benches["linear_gelu"]
    first, second = bench.cases[:2]

    def row(case, provider, us, **changes):
        named = {"op": bench.op, "mode": case.mode, "provider": provider, "shape": case.label, "dtype": "bf16"}
        return {**named, "p50_us": str(us), "timer": "graph", "passed": "True", **code, **changes}

    half = row(second, "vtk", 5.0)
    other = row(first, "cublaslt", 8.0)
    found = _choices.entries(benches, [row(first, "eager", 9.0), row(first, "vtk", 7.5), other, half])
    assert [(e["rows"], e["n"], e["k"], e["choice"]) for e in found] == [(197, 3072, 384, "triton")]
    for no in ({"passed": "False"}, {"timer": "launch"}):
        assert _choices.entries(benches, [row(first, "eager", 9.0), row(first, "vtk", 7.5, **no), other]) == []
    assert _choices.entries(benches, [row(first, "eager", 9.0), row(first, "vtk", 7.5)]) == []
    slower = [row(first, "eager", 9.0), row(first, "vtk", 9.5), row(first, "compile", 1.0)]
    for us, choice in ((9.25, "aten"), (8.0, "cublaslt")):
        (entry,) = _choices.entries(benches, [*slower, row(first, "cublaslt", us)])
        assert entry["choice"] == choice
    packed = benches["packed_attention"]  # a way that a shape cannot go is not waited for
    long = next(c for c in packed.cases if packed.choice(c) and c.shape["N"] == 577)
    named = {"op": packed.op, "shape": long.label}
    rows = [row(long, "eager", 3.0, **named), row(long, "triton", 2.0, **named)]
    assert [(e["n"], e["choice"]) for e in _choices.entries(benches, rows)] == [(577, "triton")]
    _choices.write(tmp_path / "choices.json", found)
    entry = choices.read(tmp_path / "choices.json")[-1]
    assert (
        entry["torch"] == "2.11"
        and entry["dtype"] == "bfloat16"
        and entry["us"] == {"aten": 9.0, "triton": 7.5, "cublaslt": 8.0}
    )


def test_numbers_of_slices_that_the_model_does_not_take_decide_nothing(code):
    benches = correct.benches()
    case = benches["splitk_linear"].cases[0]
    named = {"op": "splitk_linear", "mode": "forward", "shape": case.label, "dtype": "bf16", "timer": "graph", **code}
    named["passed"] = "True"
    times = {"eager": 1.0, "aten": 5.0, "vtk": 6.0, "finish": 7.0, "split4": 4.0}
    found = _choices.entries(benches, [{**named, "provider": p, "p50_us": str(t)} for p, t in times.items()])
    assert [(e["choice"], e["us"]) for e in found] == [
        ("aten", {"aten": 5.0, "triton": 6.0, "finish": 7.0}),
    ]  # fmt: skip
