"""Every operation's benchmark: it runs, its providers agree, and the FLOPs it claims are those that torch counts."""

from dataclasses import replace

import _runner
import correct
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

BENCHES = correct.benches()
CPU = torch.device("cpu")


@pytest.mark.parametrize("op", BENCHES)
def test_smoke(op, capsys):
    assert _runner.main(BENCHES[op], ["--smoke"]) == 0
    providers = BENCHES[op].names(replace(BENCHES[op].checks[0], compiled=False))
    assert len(capsys.readouterr().out.splitlines()) == len(providers)


@pytest.mark.parametrize("op", BENCHES)
def test_every_check_holds_in_fp32_against_fp64(op):
    bench = BENCHES[op]
    reference = bench.reference or bench.providers["eager"]
    for case in bench.checks:
        case = replace(case, dtype="fp32")
        inputs = bench.make(case, CPU)
        exact = bench.bind(
            reference, {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}, case
        )()
        plain = bench.bind(reference, inputs, case)()
        for provider in correct.kernels_of(bench, case):
            ours = correct.filled_with_nan(bench.bind(bench.providers[provider], inputs, case))
            row = correct.judge((op, case.label, "fp32"), ours, plain, exact)
            assert row["passed"], row


@pytest.mark.parametrize("op", [op for op, bench in BENCHES.items() if any(c.flops for c in bench.checks)])
def test_expected_flops_are_those_of_the_matrix_products(op):
    bench = BENCHES[op]
    for case in bench.checks:
        if case.mode == "forward":
            inputs = bench.make(replace(case, dtype="fp32"), CPU)
            # the CPU's flash attention is not counted, its two products are
            with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
                bench.providers["eager"](inputs, case)
            assert counter.get_total_flops() == case.flops, case.label


@pytest.mark.parametrize("op", BENCHES)
def test_expected_bytes_are_those_of_operands_and_results(op):
    bench = BENCHES[op]
    for case in bench.checks:
        if case.mode == "forward" and not case.shape.get("queries"):  # with few queries most of q is not read
            inputs = bench.make(case, CPU)
            outputs = _runner.as_tuple((bench.reference or bench.providers["eager"])(inputs, case))
            moved = sum(t.nbytes for t in (*inputs.values(), *outputs))
            assert case.bytes == pytest.approx(moved, rel=0.05), case.label


@pytest.mark.parametrize("op", BENCHES)
def test_no_shape_is_there_twice(op):
    bench = BENCHES[op]
    labels = [(case.mode, case.label) for case in (*bench.checks, *bench.cases)]
    assert len(set(labels)) == len(labels)


def test_operands_are_the_same_at_every_call():
    bench = BENCHES["linear_gelu"]
    first, second = (bench.make(bench.checks[0], CPU) for _ in range(2))
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_a_provider_that_differs_is_not_timed(monkeypatch, capsys):
    bench = replace(BENCHES["norm"], providers={**BENCHES["norm"].providers, "vtk": lambda t, case: t["x"]})
    row = _runner.measure(bench, bench.checks[0], "vtk", CPU, None, quick=True)
    assert row["passed"] is False and row["p50_us"] is None and row["timer"] is None
    assert _runner.main(bench, ["--smoke"]) == 1
    assert "differs from eager, not timed" in capsys.readouterr().out


def test_percent_is_the_larger_floor_over_the_time(monkeypatch):
    monkeypatch.setattr(_runner, "time_call", lambda *args, **kwargs: (20.0, 19.0, 21.0))
    case = replace(BENCHES["linear_gelu"].checks[0], bytes=1000, flops=10_000, dtype="fp32")
    slow_memory, slow_units = _runner.Ceilings(1e8, 1e15), _runner.Ceilings(1e15, 1e9)
    rows = [_runner.measure(BENCHES["linear_gelu"], case, "vtk", CPU, c) for c in (slow_memory, slow_units)]
    assert [row["percent"] for row in rows] == [50.0, 50.0]  # 1000 B at 1e8 B/s, 10000 FLOP at 1e9 FLOP/s: 10 µs each
    assert rows[0]["gb_s"] == 0.1 and rows[0]["p50_us"] == 20.0 and rows[0]["p80_us"] == 21.0
    assert rows[0]["timer"] == "clock"


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures here")
def test_without_a_gpu_only_a_smoke_test_runs():
    with pytest.raises(SystemExit, match="--smoke"):
        _runner.main(BENCHES["norm"], [])
