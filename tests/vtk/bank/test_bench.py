"""``vtk tasks bench`` on small packs."""

import json
from typing import Any

import pytest
import torch

from vtk.__main__ import main
from vtk.bank.bench import compare
from vtk.bank.bench_result import FUSED, PLAIN
from vtk.errors import VerificationError

KEYS = {"tasks", "device", "dtype", "rounds", "bank_bytes", "bank_host_bytes", "separate_bytes", "not_fused", "cells"}


def test_both_sides_are_measured(five: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lab, packs = five
    args = ["--pack", str(packs["pets"]), "--pack", str(packs["dogs"]), "--copies", "2", "--batch", "4,6"]
    options = ["--rounds", "7", "--base", str(lab.weights), "--device", "cpu", "--json"]
    assert main(["tasks", "bench", *args, *options]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert set(result) == KEYS
    assert (result["tasks"], result["dtype"], result["rounds"]) == (4, "float32", 7)
    assert [cell["images"] for cell in result["cells"]] == [4, 6]
    assert result["bank_bytes"] < result["separate_bytes"]
    for cell in result["cells"]:
        for side in cell["sides"].values():
            assert side["images_per_s"] == pytest.approx(1e3 * cell["images"] / side["latency_ms"])
        assert cell["max_difference"] < 1e-4
        assert list(cell["sides"]) == [*PLAIN, *FUSED]
        assert [name for name, side in cell["sides"].items() if side["of_single"]] == ["bank", "bank, fused"]
        assert cell["sides"]["separate models"]["speedup"] == 1
    assert max(map(len, err.splitlines())) <= 80
    assert "separate models" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give `--pack FOLDER`"),
        (["--pack", "x", "--rounds", "3"], "`--rounds` is 3; allowed is at least 7"),
        (["--pack", "x", "--copies", "4", "--batch", "3"], "there are 4 tasks"),
        (["--pack", "x"], "there is no folder"),
    ],
)
def test_wrong_flags(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "bench", *argv]) in (2, 3)
    err = capsys.readouterr().err
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_wrong_logits_are_not_timed() -> None:
    right = {"a": torch.ones(2, 3)}
    assert compare(right, right) == 0
    for wrong in (torch.full((2, 3), 1.1), torch.full((2, 3), float("nan"))):
        with pytest.raises(VerificationError, match=r"task `a`.*nothing was timed"):
            compare({"a": wrong}, right)
