"""``vtk tasks bench --tasks N``: what is measured, of which tasks, and what is refused."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import timm

from vtk.__main__ import main
from vtk.bank import TaskBank
from vtk.packs.load import load_task
from vtk.packs.synthetic import write_synthetic


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_bank_of_synthetic_tasks_is_measured_beside_models_of_their_own(
    five: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, packs = five
    calls: list[tuple[int, set[str]]] = []
    real = TaskBank.__call__

    def recorded(bank: TaskBank, images: Any) -> Any:
        calls.append((len(bank.tasks), set(images)))
        return real(bank, images)

    monkeypatch.setattr(TaskBank, "__call__", recorded)
    made: list[tuple[Any, Any]] = []

    def written(*args: Any, **options: Any) -> Path:
        made.append((options["rank"], options["seed"]))
        return write_synthetic(*args, **options)

    monkeypatch.setattr("vtk.bank.synthetic_bench.write_synthetic", written)
    options = [
        "--pack",
        str(packs["pets"]),
        "--tasks",
        "6",
        "--rank",
        "0,2,64",
        "--task-classes",
        "4",
        "--batch",
        "3,6",
    ]
    options += ["--rounds", "7", "--base", str(lab.weights), "--device", "cpu", "--json"]
    assert main(["tasks", "bench", *options]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert (result["tasks"], result["ranks"], result["pack_dtype"], result["models_held"]) == (6, [0, 2, 64], "bf16", 4)
    model = timm.create_model(lab.model, **lab.kwargs, img_size=32, num_classes=4)
    own = load_task(packs["pets"], base=lab.weights).model
    scales = sum(v.numel() for k, v in own.state_dict().items() if k.endswith("cb.scale"))
    size = 4 * (sum(v.numel() for v in model.state_dict().values()) + scales)
    assert made == [(0, 0), (2, 1), (64, 2), (0, 3), (2, 4), (64, 5)]
    held = result["bytes"]
    assert (held["one_model"], held["separate"]) == (size, 6 * size)
    assert held["bank_base"] < held["bank"] < held["separate"] and 0 < held["packs"] < held["separate"]
    few, every = result["cells"]
    assert (few["images"], few["tasks"], every["images"], every["tasks"]) == (3, 3, 6, 6)
    assert list(few["sides"]) == ["bank", "bank, same tasks", "bank of these only", "separate models", "one model"]
    assert list(every["sides"]) == ["bank", "separate models", "one model"]
    assert few["idle"] > 0 and every["idle"] is None
    for cell in (few, every):
        assert cell["max_difference"] < 1e-4
        assert cell["sides"]["separate models"]["speedup"] == cell["sides"]["one model"]["of_one"] == 1
        for side in cell["sides"].values():
            assert side["images_per_s"] == pytest.approx(1e3 * cell["images"] / side["latency_ms"])
    drawn = [names for tasks, names in calls if tasks == 6 and len(names) == 3]
    assert set.union(*drawn) == {f"task{i:04d}" for i in range(6)} and len(set(map(frozenset, drawn))) > 2
    assert all(names == {"task0000", "task0001", "task0002"} for tasks, names in calls if tasks == 3)
    assert set(result["adding"]) == {"first_ms", "median_ms", "early_ms", "late_ms"}
    assert max(map(len, err.splitlines())) <= 80
    assert "6 separate models" in err and "3 idle tasks" in err
    assert not list(tmp_path.glob("vtk-bench-*"))


def test_a_model_by_name_needs_no_pack_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VTK_HOME", str(tmp_path / "home"))
    options = ["--tasks", "2", "--model", "test_vit", "--img-size", "32", "--pack-dtype", "int8", "--rounds", "7"]
    options += ["--images-per-task", "2", "--max-bytes", "1000000000"]
    assert main(["tasks", "bench", *options, "--device", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["model"], result["size"], result["classes"]) == ("test_vit", [32, 32], 10)
    assert [(cell["images"], cell["tasks"]) for cell in result["cells"]] == [(4, 2)]
    assert result["bytes"]["bank_merged"] > 2 * result["bytes"]["bank_factors"] > 0  # both were used often enough
    assert not list(tmp_path.iterdir())


def test_wrong_logits_of_the_bank_are_not_timed(
    five: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, packs = five
    real = TaskBank.__call__
    monkeypatch.setattr(TaskBank, "__call__", lambda bank, images: {k: v + 1 for k, v in real(bank, images).items()})
    options = ["--pack", str(packs["pets"]), "--tasks", "2", "--base", str(lab.weights), "--device", "cpu"]
    assert main(["tasks", "bench", *options]) == 4
    assert "nothing was timed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rank", "4"], "`--rank` is of synthetic packs; give `--tasks N` too"),
        (["--pack", "x", "--img-size", "32"], "`--img-size` is of synthetic packs"),
        (["--pack", "x", "--pack-dtype", "int8"], "`--pack-dtype` is of synthetic packs"),
        (["--tasks", "0"], "`--tasks` is 0; allowed is at least 1"),
        (["--tasks", "2", "--rank", "-1"], "`--rank`"),
        (["--tasks", "2", "--pack", "x", "--pack", "y"], "`--tasks` makes packs of one model"),
        (["--tasks", "2", "--pack", "x", "--copies", "2"], "no --copies"),
        (["--tasks", "2", "--pack", "x", "--model", "test_vit"], "`--pack` and `--model` name two models"),
        (["--tasks", "2", "--max-bytes", "9", "--max-gpu-bytes", "9"], "`--max-gpu-bytes` is the older name"),
        (["--tasks", "2", "--batch", "2", "--images-per-task", "2"], "both say how many images a call has"),
        (["--tasks", "2", "--model", "resnet18"], "a bank holds timm's"),
        (["--tasks", "2", "--model", "nonesuch"], "nonesuch"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtk.bank.synthetic_bench.write_synthetic", lambda *args, **options: pytest.fail("too late"))
    assert main(["tasks", "bench", *argv]) in (2, 3)
    lines = [line for line in capsys.readouterr().err.splitlines() if "packs/s" not in line]
    assert len(lines) == 1 and message in lines[0]
