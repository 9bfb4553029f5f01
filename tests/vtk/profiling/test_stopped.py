"""Ctrl-C in the middle: what was measured is kept, shown and written; what was not compared again is not."""

import json
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vtk.__main__ import main
from vtk.profiling import profile as profile_module
from vtk.profiling.config import ProfileConfig
from vtk.profiling.profile import profile
from vtk.profiling.result import ProfileResult
from vtk.profiling.sizes import profile_sizes


def stopping(batch: int, after: int):
    """A back-end's fault: somebody presses Ctrl-C at this call of this batch size."""
    seen = 0

    def fault(size: int, logits: Tensor, call: int) -> Tensor:
        nonlocal seen
        seen += size == batch
        if seen > after:
            raise KeyboardInterrupt
        return logits

    return fault


@pytest.mark.parametrize("order", ["interleaved", "sequential"])
def test_finished_cells_are_kept(fakes, order: str) -> None:
    backends = {"eager": fakes.Backend("eager", stopping(4, 3)), "compile": fakes.Backend("compile")}
    result = fakes.run(backends, batch_sizes=(1, 2, 4, 8), order=order)
    assert result.stopped and result.exit_code == 130
    kept = [(b.name, c.batch, c.status) for b, c in result.cells()]
    both = [(name, batch, "ok") for name in ("eager", "compile") for batch in (1, 2)]
    assert kept == (both if order == "interleaved" else both[:2])  # the cell of batch 4 was under way
    assert "stopped early" in result.warnings[0]
    assert backends["eager"].log[-1] == "close eager" and torch.get_num_threads() >= 1


def test_nothing_measured_is_nothing_kept(fakes) -> None:
    with pytest.raises(KeyboardInterrupt):
        fakes.run({"eager": fakes.Backend("eager", stopping(1, 2))})


def test_a_wrong_output_is_not_forgotten(fakes) -> None:
    def wrong(batch: int, logits: Tensor, call: int) -> Tensor:
        if batch == 2:
            raise KeyboardInterrupt
        return logits + 1

    assert fakes.run({"eager": fakes.Backend("eager", wrong)}).exit_code == 4


def test_reports_of_a_stopped_run_are_written(
    fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = fakes.run({"eager": fakes.Backend("eager", stopping(2, 1))})
    monkeypatch.setattr(profile_module, "run", lambda *_, **__: measured)
    out = tmp_path / "out"
    assert main(["profile", "test_vit", "--no-pretrained", "--out", str(out), "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["stopped"] is True
    found = ProfileResult.read(out / "profile.json")
    assert found.stopped and [c.batch for _, c in found.cells()] == [1]


def test_sizes_that_were_measured_are_kept(fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = fakes.run({"eager": fakes.Backend("eager")}, batch_sizes=(1,))

    def fake(source: str, config: ProfileConfig, *, img_size: int, **_: object) -> ProfileResult:
        if img_size == 64:
            raise KeyboardInterrupt
        return measured

    monkeypatch.setattr("vtk.profiling.sizes.profile", fake)
    config = ProfileConfig(img_sizes=(32, 64, 96), out=tmp_path / "out")
    (only,) = profile_sizes("test_vit", config, show_progress=False, pretrained=False)
    assert only.stopped and only.exit_code == 130 and (tmp_path / "out" / "sizes.html").is_file()


def test_a_stop_before_the_first_cell_leaves_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        time.sleep(0)
        raise KeyboardInterrupt

    monkeypatch.setattr(profile_module, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        profile("test_vit", pretrained=False)
    assert main(["profile", "test_vit", "--no-pretrained"]) == 130
    assert capsys.readouterr().err.strip().splitlines()[-1] == "vtk: stopped"
