"""benchmarks/fused_cpu.py and benchmarks/launches.py run on small models."""

import csv

import fused_cpu
import launches
import pytest
import torch

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", fused_cpu.PAIRS)
def test_the_fused_model_is_timed_beside_both_of_timms(name):
    row = fused_cpu.against_timm(name, 2, ">= 1", 2, True)
    assert row["rounds"] == 2 and row["ratio"] > 0 and all(row[side] > 0 for side in fused_cpu.SIDES)


def test_twins_have_equally_many_parameters_in_their_blocks():
    sizes = {
        sum(p.numel() for p in model.smaller(embed_dim=48, num_heads=3).build(32, device=CPU).blocks.parameters())
        for model in fused_cpu.PAIRS["two blocks of B18x2"]
    }
    assert len(sizes) == 1


def test_outputs_that_differ_are_not_timed():
    with pytest.raises(SystemExit, match="nothing was timed"):
        fused_cpu.compare(torch.ones(3), torch.full((3,), torch.nan), "x")


def test_a_ratio_is_against_the_better_one(monkeypatch):
    times = {"sequential": [30.0, 32.0], "parallel": [20.0, 24.0], "fused": [10.0, 10.0]}
    monkeypatch.setattr(fused_cpu, "in_turns", lambda sides, rounds: times)
    row = fused_cpu.against_timm("S18x2", 1, ">= 1.12", 2, True)
    assert row["ratio"] == 2.2 and row["parallel"] == 22.0


def test_sides_run_in_turns():
    order = []
    found = fused_cpu.in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b"] * 3 and [len(v) for v in found.values()] == [2, 2]


def test_few_rounds_are_refused(capsys):
    with pytest.raises(SystemExit):
        fused_cpu.main(["--rounds", "3"])
    assert "`--rounds` is 3; a median needs at least 7" in capsys.readouterr().err


def test_launches_are_counted_per_model(tmp_path):
    path = tmp_path / "launches.csv"
    assert launches.main(["--results", str(path), "--models", "S/16", "--skip-tests"]) == 0
    with path.open(newline="") as file:
        row, folded = csv.DictReader(file)
    assert row["model"] == "S/16" and 12 * 7 < int(row["kernels"]) <= 88 and row["bound"] == "<= 88"
    assert folded["model"] == "S/16, folded" and 12 * 5 < int(folded["kernels"]) <= 65 and folded["bound"] == "<= 65"


@pytest.mark.slow
def test_the_whole_script_in_small(capsys):
    assert fused_cpu.main(["--smoke", "--threads", "1"]) == 0
    nodes = next(line for line in capsys.readouterr().out.splitlines() if "nodes" in line)
    assert "<= 80 nodes" in nodes
