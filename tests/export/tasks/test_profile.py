"""``vtk export tasks --profile``: each task's file, and the gathered one with a mix of tasks."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest

from vtk.__main__ import main
from vtk.profiling import export_profile as exported
from vtk.profiling.result import ProfileResult
from vtk_export.tasks.config import TasksCommand
from vtk_export.tasks.index import known_files

QUICK = ("--backends", "ort-cpu", "--device", "cpu", "--threads", "1", "--duration", "0.02", "--batch-sizes", "3")


def check(out: Path) -> None:
    for name, classes in (("pets", 3), ("cars", 5), ("gathered", 5)):
        result = ProfileResult.read(out / f"{name}.latency.json")
        (backend,) = [b for b in result.backends if b.name == "ort-cpu"]
        assert [(c.batch, c.status) for c in backend.cells] == [(1, "ok"), (3, "ok")], name
        # padding is fp32's lowest number: an error beside it must not vanish
        assert backend.cells[1].max_diff is not None and backend.cells[1].max_diff < 1e-3
        assert (out / f"{name}.latency.png").is_file() and result.work is not None
        assert result.work.values == 3 * 32 * 32 + classes + (2 if name == "gathered" else 0)
    assert "2 tasks in turn" in result.inputs and "its own task's model" in result.reference


def test_each_file_is_measured_and_the_gathered_one_with_a_mix(
    both, packs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exported, "SECONDS", 0.02)
    out = tmp_path / "all"
    shutil.copytree(both.out, out)
    config = TasksCommand(out=out, packs=(packs["pets"], packs["cars"]), form="both", threads=1, profile=(1, 3))
    files = tuple(SimpleNamespace(name=name, path=out / f"{name}.onnx") for name in ("pets", "cars"))
    code, found = exported.profile_tasks(SimpleNamespace(path=out, files=files, gathered=out / "gathered.onnx"), config)
    assert code == 0 and list(found) == ["pets", "cars", "gathered"]
    check(out)
    # the next export takes away what its index names
    latency = {f"{name}.latency.{end}" for name in found for end in ("json", "png")}
    assert latency <= known_files(out) and set(both.index["files"]) <= known_files(out)


@pytest.mark.slow
def test_the_command_measures_and_the_next_export_clears_up(
    both, packs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exported, "SECONDS", 0.02)
    out = tmp_path / "all"
    argv = ["export", "tasks", str(packs["pets"]), str(packs["cars"]), "--form", "both", "--out", str(out)]
    assert main([*argv, "--threads", "1", "--json", "--profile", "1,3"]) == 0
    assert list(json.loads(capsys.readouterr().out)["profile"]) == ["pets", "cars", "gathered"]
    check(out)
    assert main([*argv, "--threads", "1"]) == 0
    assert not list(out.glob("*latency*"))


def test_a_gathered_file_that_takes_the_wrong_tasks_weights_gets_no_number(
    both, packs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from vtk.profiling.config import ProfileConfig
    from vtk.profiling.export_profile import mixed_answers
    from vtk.profiling.profile import run
    from vtk.runtime.backends.base import load_backend
    from vtk.runtime.opening import open_source

    file = both.out / "gathered.onnx"
    assert main(["profile", str(file), *QUICK]) == 0  # alone it is compared with itself
    assert "2 tasks in turn" in capsys.readouterr().out
    source = open_source(file, many=True)
    assert source.tasks == ("pets", "cars")
    config = ProfileConfig(batch_sizes=(3,), backends=("ort-cpu",), duration=0.02, device="cpu", threads=1)
    for names, code in ((("pets", "cars"), 0), (("cars", "pets"), 4)):
        answers = mixed_answers({name: packs[name] for name in names})
        assert run(config, source, load_backend, reference=answers, show_progress=False).exit_code == code


def test_a_file_of_many_tasks_that_does_not_name_them_is_refused(
    both, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proto = onnx.load(both.out / "gathered.onnx")
    del proto.metadata_props[:]
    onnx.save(proto, tmp_path / "gathered.onnx")
    assert main(["profile", str(tmp_path / "gathered.onnx"), *QUICK]) == 3
    assert "does not say which there are" in capsys.readouterr().err


def test_a_task_named_as_anothers_latency_is_refused_before_the_export(
    packs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [f"a={packs['pets']}", f"A.latency={packs['cars']}"]
    assert main(["export", "tasks", *named, "--out", str(tmp_path / "x"), "--profile", "1"]) == 2
    assert "card of the task `A.latency`" in capsys.readouterr().err and not (tmp_path / "x").exists()
