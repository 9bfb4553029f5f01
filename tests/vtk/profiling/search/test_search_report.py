"""A search on the terminal, in files and as a picture, and the command that it recommends."""

import csv
import io
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text

from vtk.card import Card, InputSpec, ModelSpec
from vtk.commands import _cli
from vtk.profiling.config import ProfileConfig
from vtk.profiling.search.accuracy import Verdict
from vtk.profiling.search.plot import frontier_figure
from vtk.profiling.search.racing import Race
from vtk.profiling.search.recommendation import command_for, note_for
from vtk.profiling.search.report import FILES, MARKS, print_search, to_csv, write_search
from vtk.profiling.search.result import SearchResult, choice_of, frontier, rows_of
from vtk.profiling.search.setup import FULL, Reading, Setup, shapes
from vtk.runtime.source import Source
from vtk_export.aoti.config import AotiCommand
from vtk_export.gate.judge import Judgement
from vtk_export.onnx.config import OnnxCommand
from vtk_export.openvino.config import OpenvinoCommand
from vtk_export.triton.config import TritonCommand

VARIANTS = (("openvino", "bf16"), ("openvino", "fp32"), ("openvino", "int8"), ("ort-cpu", "fp32"), ("ort-cpu", "int8"),
            ("ort-cpu", "int8-dynamic"), ("fused", "fp32"), ("fused", "bf16"))  # fmt: skip


def race_of(cpus: int = 4, budget_ms: float = 40.0) -> Race:
    """Every setup measured, the larger batches briefly, and one that failed."""
    setups = tuple(sorted(Setup(*v, t, n, b) for v in VARIANTS for t, n in shapes(cpus) for b in (1, 4, 16)))
    race = Race(budget_ms, 90, setups)
    for setup in setups:
        ms = (3 + 2 * VARIANTS.index(setup.variant)) * setup.batch**0.8 / setup.threads**0.6
        ms *= 1 + 0.1 * setup.instances
        race.readings[setup] = Reading()
        race.readings[setup].add(*[[ms] * 60] * (2 if setup.batch == 16 else FULL))
    race.out[setups[0]] = "failed"
    return race


def result_of(race: Race, **more: Any) -> SearchResult:
    best = race.best
    judged = Judgement(256, 0.992, 0.999, 0.95, 0.84, 0.836, "held-out images of /a/rather/long/path/to/some/images")
    rows = rows_of(race, dict.fromkeys(race.setups[:1], "an instance ended by signal 9, perhaps for want of memory"))
    values: dict[str, Any] = {
        "source": "runs/pets/task", "kind": "pack", "model": "vit_small_patch14_dinov2", "input_shape": (3, 56, 56),
        "device_name": "A CPU with a rather long name, 96 cores @ 2.60 GHz", "cpus": 8, "budget_ms": race.budget_ms,
        "percentile": race.q, "duration_s": 10.0, "exhaustive": False, "cut": True, "stopped": False,
        "reference": "torch fp32 on the CPU", "inputs": "8 images",
        "accuracy": tuple(Verdict(*v, v[1] != "int8", "top-1 drops" * (v[1] == "int8"), judged) for v in VARIANTS),
        "setups": rows, "choice": None if best is None else choice_of(race, best),
        "best": next((row for row in rows if row.setup == best), None),
        "faster": "", "command": "vtk export onnx runs/pets/task", "note": "run it", "search_s": 97.0,
        "exhaustive_s": 264.0,
    }  # fmt: skip
    return SearchResult(**{**values, **more})


def test_the_terminal_has_tables_of_80_columns_and_ends_with_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of(race_of())
    print_search(result)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "  vtk export onnx runs/pets/task"
    text = " ".join(line.strip() for line in lines)
    assert "openvino int8: left out: top-1 drops" in text and "signal 9" in text and "time was up" in text
    assert f"budget 40 ms: {result.best.setup.text} meets it" in text  # type: ignore[union-attr]
    # of each back-end and precision the best within the budget, the most images first
    table = lines[lines.index("best of each back-end and precision") + 2 :]
    rates = [float(line.split()[-1].replace(",", "")) for line in table[: table.index("")]]
    assert rates == sorted(rates, reverse=True) and len(rates) == len(VARIANTS)


def test_nothing_measured_is_said_and_fails() -> None:
    empty = result_of(Race(5.0, 90, (Setup("ort-cpu", "fp32", 1, 1, 1),)))
    assert (empty.choice, empty.exit_code) == (None, 1)
    print_search(empty)
    frontier_figure(empty)


def test_the_frontier_is_what_no_other_setup_beats() -> None:
    race = race_of(2)
    edge = {row.setup for row in result_of(race).setups if row.frontier}
    for setup in race.measured:
        beaten = any(
            (race.latency(o) <= race.latency(setup) and race.rate(o) > race.rate(setup))
            or (race.latency(o) < race.latency(setup) and race.rate(o) == race.rate(setup))
            for o in race.measured
        )  # fmt: skip
        same = [o for o in edge if (race.latency(o), race.rate(o)) == (race.latency(setup), race.rate(setup))]
        assert beaten is not bool(same)
    assert frontier([]) == set()


@pytest.mark.parametrize("cpus", [pytest.param(2, marks=pytest.mark.slow), 16])
def test_texts_of_the_plot_neither_overlap_nor_leave_the_frame(cpus: int) -> None:
    race = race_of(cpus)
    figure = frontier_figure(result_of(race))
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    (axes,) = figure.axes
    boxes = [a.get_window_extent() for a in axes.texts]
    ticks = {t for axis in (axes.xaxis, axes.yaxis) for t in (*axis.get_ticklabels(), *axis.get_ticklabels(minor=True))}
    every = [t.get_window_extent() for t in figure.findobj(Text) if t.get_text().strip() and t not in ticks]
    assert all(b.x0 >= 0 and b.y0 >= 0 and b.x1 <= width and b.y1 <= height for b in every)
    labels = boxes[1:]  # the first is the budget's
    assert labels and not any(a.overlaps(b) for i, a in enumerate(labels) for b in labels[i + 1 :])
    # a point for each measured setup
    assert sum(len(line.get_xdata()) for line in axes.lines if line.get_markersize() == 5.5) == len(race.measured)


def test_what_is_over_the_budget_is_not_called_recommended() -> None:
    result = result_of(race_of(2))
    assert result.best is not None and result.best.judged_ms is not None
    for budget, wanted in ((2 * result.best.judged_ms, "recommended"), (result.best.judged_ms / 2, "nearest")):
        (axes,) = frontier_figure(replace(result, budget_ms=budget)).axes
        (name,) = [line.get_label() for line in axes.lines if line.get_markersize() == 11]
        assert name.startswith(wanted)


def test_an_int8_recommendation_says_the_precision_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    for rest, hint in (("bf16", "bf16"), ("fp32", "f32")):
        monkeypatch.setattr("vtk.profiling.search.recommendation.default_precision", lambda rest=rest: rest)
        assert f"INFERENCE_PRECISION_HINT {hint}, " in note_for(Setup("openvino", "int8", 1, 1, 4))
    assert "INFERENCE_PRECISION_HINT f32, " in note_for(Setup("openvino", "fp32", 1, 1, 4))


def test_files_are_recognised_as_ours_and_hold_a_row_for_each_setup(tmp_path: Path) -> None:
    result = result_of(race_of(2))
    write_search(result, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)
    assert all(recognise(tmp_path / name) for name, recognise in MARKS.items())
    rows = list(csv.DictReader(io.StringIO(to_csv(result))))
    assert len(rows) == len(result.setups) and rows[0]["status"] == "failed"


CARD = Card(ModelSpec("test_vit"), InputSpec(160, 160), ("a", "b"))
PACK = Source("pack", "pets/é", Path("runs/my pets/task"), CARD)
COMMANDS = {"onnx": OnnxCommand, "openvino": OpenvinoCommand, "aoti": AotiCommand, "triton": TritonCommand}
OPENING = {"base": "some base", "pretrained": False, "num_classes": 3, "img_size": (32, 48), "trust": True, "seed": 7}


@pytest.mark.parametrize("opening", [{}, OPENING], ids=["plain", "opened with everything"])
@pytest.mark.parametrize("setup", [
    Setup("ort-cpu", "fp32", 1, 2, 4), Setup("ort-cpu", "int8", 1, 2, 4), Setup("ort-cpu", "int8-dynamic", 1, 1, 1),
    Setup("openvino", "fp32", 1, 2, 4), Setup("openvino", "bf16", 2, 1, 4), Setup("openvino", "int8", 2, 1, 4),
    Setup("aoti", "bf16", 2, 1, 4), Setup("bank", "bf16", 1, 2, 4),
], ids=lambda setup: setup.text)  # fmt: skip
def test_the_command_is_one_that_the_exporter_takes(
    setup: Setup, opening: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ProfileConfig(on="cpu", budget_ms=20.0, data=Path("some data"))
    first = shlex.split(command_for(setup, PACK, "runs/my pets/task", config, opening))
    assert first[:2] == ["vtk", "export"]
    target, argv = first[2], first[3:]
    name = "sources" if target == "triton" else "source"
    parsed: Any = _cli.parse(COMMANDS[target], argv, prog="vtk", description="", positional=(name,))
    if target != "triton":
        assert parsed.opening()["img_size"] == opening.get("img_size")
    assert (parsed.sources if target == "triton" else (parsed.source,)) == ("runs/my pets/task",)
    assert getattr(parsed, "int8", None) == {"int8": "static", "int8-dynamic": "dynamic"}.get(setup.precision)
    if target == "triton":
        assert (parsed.instances, parsed.server_threads, parsed.max_batch_size, parsed.dtype) == (2, 1, 4, "bf16")
    # the folder is there now, so the next command has another one
    parsed.out.mkdir(parents=True)
    again = shlex.split(command_for(setup, PACK, "runs/my pets/task", config, opening))
    assert again[again.index("--out") + 1] != str(parsed.out)


def test_a_file_and_a_model_in_memory_have_no_command_and_what_has_no_file_says_how_it_is_run() -> None:
    config = ProfileConfig(on="cpu", budget_ms=20.0)
    setup = Setup("ort-cpu", "fp32", 1, 2, 4)
    onnx = replace(PACK, kind="onnx", path=Path("m.onnx"))
    assert command_for(setup, onnx, "m.onnx", config, {}) == command_for(setup, PACK, "", config, {}) == ""
    fused = Setup("fused", "bf16", 1, 2, 4)
    assert command_for(fused, PACK, "pack", config, {}) == ""
    assert "--backend fused --precision bf16 --threads 1" in note_for(fused)
    assert note_for(setup).startswith("run it in 2 processes of 1 thread each, 4 images a call")
    one = note_for(Setup("ort-cpu", "fp32", 2, 1, 1))
    assert one.startswith("run it in one process of 2 threads, 1 image a call")
