"""Two profiles against one another, and several image sizes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vtk.__main__ import main
from vtk.errors import DataError
from vtk.formats import write_json
from vtk.profiling.cells import BackendResult, Cell
from vtk.profiling.config import ProfileCommand
from vtk.profiling.regression import compare_profiles
from vtk.profiling.result import ProfileResult


def result(**times: float | None) -> ProfileResult:
    """A profile whose back-ends have a median at batch 1; None for a wrong output."""
    backends = tuple(
        BackendResult(
            name, cells=(Cell(1, "mismatch", "wrong") if t is None else Cell(1, runs=50, p50_ms=t, mean_ms=t),)
        )
        for name, t in times.items()
    )
    return ProfileResult(
        source="pets", kind="pack", model="vit", input_shape=(3, 224, 224), device="cpu", device_name="A CPU",
        precision="fp32", threads=1, duration_s=1.0, reference="torch", inputs="i", order="o", memory="m",
        backends=backends,
    )  # fmt: skip


@pytest.fixture
def files(tmp_path: Path):
    def write(old: ProfileResult, new: ProfileResult) -> list[str]:
        for name, found in (("old", old), ("new", new)):
            write_json(tmp_path / f"{name}.json", found.to_dict())
        return [str(tmp_path / "old.json"), str(tmp_path / "new.json")]

    return write


def test_growth_and_verdict() -> None:
    found = compare_profiles(result(eager=10.0, compile=10.0, fused=10.0), result(eager=10.2, compile=12.0, fused=8.0))
    assert [c.verdict for c in found.changes] == ["same", "slower", "faster"]
    assert [round(c.growth, 3) for c in found.changes] == [0.02, 0.2, -0.2]
    assert [c.backend for c in found.regressions(5.0)] == ["compile"]


def test_a_number_that_is_gone_is_a_regression() -> None:
    found = compare_profiles(result(eager=10.0), result(eager=None))
    assert found.changes[0].verdict == "ok → mismatch" and len(found.regressions(50.0)) == 1


@pytest.mark.parametrize("old,new,said", [
    ({"eager": 10.0, "fused": 5.0}, {"eager": 10.0}, "fused batch 1: not in the new profile"),
    ({"eager": 10.0}, {"eager": float("nan")}, "eager batch 1: no number"),
    ({"eager": 10.0}, {"eager": float("inf")}, "eager batch 1: no number"),
    ({"eager": float("nan")}, {"eager": 10.0}, "eager batch 1: no number"),
    ({"eager": 10.0}, {"eager": 0.0}, "eager batch 1: no number"),
    ({"eager": 10.0}, {"eager": None}, "eager batch 1: ok → mismatch"),
    ({"eager": 10.0}, {}, "eager batch 1: not in the new profile"),
    ({"eager": None}, {"eager": 10.0}, "nothing was compared"),
    ({}, {}, "nothing was compared"),
])  # fmt: skip
def test_a_gate_does_not_pass_on_what_is_not_there(
    old: dict, new: dict, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, times in zip(paths, (old, new), strict=True):
        path.write_text(json.dumps(result(**times).to_dict()))  # as a foreign writer does, NaN included
    argv = ["profile", "--compare", *map(str, paths), "--json"]
    assert main([*argv, "--fail-above", "50"]) == 4
    captured = capsys.readouterr()
    assert said in " ".join(captured.err.split()) and "NaN" not in captured.out
    assert main(argv) == 0  # without a limit it only shows


def test_what_had_no_number_before_may_go_and_what_is_new_is_told(files, capsys: pytest.CaptureFixture[str]) -> None:
    old = replace(result(eager=10.0, compile=None), versions={"torch": "2.13", "onnx": "1.18"})
    new = replace(result(eager=10.0, fused=7.0), versions={"torch": "2.14"})
    assert main(["profile", "--compare", *files(old, new), "--fail-above", "5", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["gone"], found["added"], found["missing"]) == (["compile batch 1"], ["fused batch 1"], [])
    said = " ".join(captured.err.split())
    assert "not in the old profile: fused batch 1" in said and "torch: 2.13 and 2.14" in said
    assert "onnx: 1.18 and none" in said


def test_a_time_of_a_cell_that_was_wrong_is_none() -> None:
    new = result(eager=10.0)
    cell = replace(new.backends[0].cells[0], status="mismatch", reason="wrong")
    new = replace(new, backends=(replace(new.backends[0], cells=(cell,)),))
    assert compare_profiles(result(eager=10.0), new).failures(50.0) == ["eager batch 1: ok → mismatch, allowed 50 %"]


@pytest.mark.parametrize("time", [None, float("nan"), -1.0])
def test_a_new_cell_that_is_wrong_does_not_pass(time: float | None) -> None:
    found = compare_profiles(result(eager=10.0), result(eager=10.0, fused=time))
    assert found.failures(50.0) == ["fused batch 1, which the old profile lacks: wrong, or no number"]
    assert not compare_profiles(result(eager=10.0), result(eager=10.0, fused=10.0)).failures(50.0)


def test_a_cell_that_is_there_twice_hides_no_other() -> None:
    slow, fast = result(eager=100.0), result(eager=10.0)
    both = replace(slow, backends=slow.backends + fast.backends)
    with pytest.raises(DataError, match="eager batch 1 twice"):
        compare_profiles(fast, both)


def test_median_is_not_compared_with_a_mean() -> None:
    few = BackendResult("eager", cells=(Cell(1, runs=12, mean_ms=30.0),))
    (change,) = compare_profiles(result(eager=10.0), replace(result(), backends=(few,))).changes
    assert (change.old_ms, change.new_ms) == (10.0, 30.0)  # both means
    both = BackendResult("eager", cells=(Cell(1, runs=50, p50_ms=20.0, mean_ms=30.0),))
    assert compare_profiles(result(eager=10.0), replace(result(), backends=(both,))).changes[0].new_ms == 20.0


@pytest.mark.parametrize("flags,code", [([], 0), (["--fail-above", "30"], 0), (["--fail-above", "5"], 4)])
def test_command(files, flags: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    paths = files(result(eager=10.0, fused=5.0), replace(result(eager=12.0, fused=5.0), threads=4))
    assert main(["profile", "--compare", *paths, *flags, "--json"]) == code
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["changes"][0]["growth"] == pytest.approx(0.2) and found["missing"] == []
    said = " ".join(captured.err.split())
    assert "threads: 1 and 4" in said and "+20.0 %" in said and ("allowed 5 %" in said) == (code == 4)


def test_refusals(files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = files(result(eager=1.0), result(eager=1.0))
    assert main(["profile", "--compare", paths[0]]) == 2
    assert main(["profile", "test_vit", "--fail-above", "5"]) == 2
    (tmp_path / "x.json").write_text("[]")
    assert main(["profile", "--compare", paths[0], str(tmp_path / "x.json")]) == 3
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 3 and "two profile.json" in lines[0] and "--compare" in lines[1] and "x.json" in lines[2]


def test_sizes_of_a_timm_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtk.profiling.plot.latency_png", lambda *_, **__: b"")  # they are drawn elsewhere
    out = tmp_path / "sizes"
    argv = ["profile", "test_vit", "--no-pretrained", "--img-sizes", "64,32", "--backends", "eager", "--device", "cpu"]
    options = ["--batch-sizes", "1", "--duration", "0.05", "--threads", "1", "--out", str(out), "--json"]
    assert main([*argv, *options]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert [r["input_shape"] for r in found] == [[3, 32, 32], [3, 64, 64]]
    assert found[1]["work"]["flops"] > 3 * found[0]["work"]["flops"]
    assert sorted(p.name for p in out.iterdir()) == ["img-32", "img-64", "sizes.html", "sizes.json"]
    assert ProfileResult.read(out / "img-64" / "profile.json").input_shape == (3, 64, 64)
    page = (out / "sizes.html").read_text(encoding="utf-8")
    assert 'href="img-32/report.html"' in page and page.count("<tr>") == 3


def test_sizes_exclude_one_size() -> None:
    with pytest.raises(Exception, match="exclude each other"):
        ProfileCommand(source="test_vit", img_size=64, img_sizes=(32,))
