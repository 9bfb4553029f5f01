"""Runs of diagnostics that stop, go on, and meet files that are damaged, changed or of another run."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.vtk.analysis._fakes import analysis, context, fake
from vtk.analysis.result_files import read_analysis
from vtk.analysis.run import draw, run_diagnostics
from vtk.errors import DataError, NoResultError, UsageError

V0_1 = Path(__file__).resolve().parents[2] / "fixtures" / "v0_1"


class Counted:
    """A measurement that says how often it ran, and what it was given of an earlier run."""

    def __init__(self, value: float = 1.0) -> None:
        self.value, self.saved = value, []

    def __call__(self, given):
        self.saved.append(dict(given.saved))
        return {"value": self.value, "text": ("x", 2)}


@pytest.fixture
def known(monkeypatch):
    """Diagnostics by name that take the place of the real ones."""
    diagnostics = {}
    monkeypatch.setattr("vtk.analysis.run.diagnostic", lambda name: diagnostics[name])
    return diagnostics


def run(out, *names, config=None, identity=None, **more):
    of = {"model": "1", "images": "2", **(identity or {})}
    given = replace(context(**(config or {})), digest=of.pop("images"))
    return run_diagnostics(lambda name: given, names, out, label="m", identity=of, facts={"model": "m"}, **more)


def test_a_second_run_takes_what_is_there_and_measures_the_rest(known, tmp_path):
    entropy, cka = Counted(2.0), Counted(3.0)
    known.update(entropy=fake("entropy", entropy), cka=fake("cka", cka))
    first = run(tmp_path, "entropy")
    files = {path.name: path.read_bytes() for path in (tmp_path / "results").iterdir()}
    second = run(tmp_path, "entropy", "cka")
    assert (len(entropy.saved), len(cka.saved)) == (1, 1)
    assert list(second.results) == ["entropy", "cka"] and second.results["entropy"] == first.results["entropy"]
    assert second.seconds["entropy"] == first.seconds["entropy"]
    assert (tmp_path / "results" / "entropy.json").read_bytes() == files["entropy.json"]
    assert second.results["cka"] == {"value": 3.0, "text": ["x", 2]}  # as it is read back from JSON
    assert read_analysis(tmp_path) == second
    assert second.peak_memory_bytes > 1e6


@pytest.mark.parametrize(
    "change",
    [
        {"identity": {"model": "1", "images": "other"}}, {"identity": {"model": "2", "images": "2"}},
        {"config": {"grid": 21}}, {"config": {"seed": 1}}, {"config": {"batch_size": 8}},
    ],
    ids=["images", "model", "own option", "seed", "batch size"],
)  # fmt: skip
def test_what_a_result_depends_on_is_measured_again(change, known, tmp_path):
    of_grid, plain = Counted(), Counted()
    known.update(landscape=fake("landscape", of_grid, options=("grid",)), cka=fake("cka", plain))
    run(tmp_path, "landscape", "cka")
    run(tmp_path, "landscape", "cka", **change)
    assert len(of_grid.saved) == 2
    assert len(plain.saved) == (1 if change == {"config": {"grid": 21}} else 2)
    run(tmp_path, "landscape", "cka", **change)
    assert len(of_grid.saved) == 2


class Stopped(BaseException):
    """As a signal: nothing catches it."""


def test_a_stopped_diagnostic_goes_on_from_what_it_saved(known, tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("vtk.analysis.run.time.monotonic", lambda: clock[0])
    rows, fail_at = [], [3]

    def measure(given):
        done = list(given.saved.get("rows", []))
        for i in range(len(done), 5):
            if i == fail_at[0]:
                raise Stopped
            rows.append(i)
            clock[0] += 10
            done.append(float("nan") if i == 0 else float(i))
            given.save({"rows": done})
        return {"value": sum(done[1:]), "first": done[0]}

    known.update(landscape=fake("landscape", measure), entropy=fake("entropy"))
    with pytest.raises(Stopped):
        run(tmp_path, "entropy", "landscape")
    assert rows == [0, 1, 2] and not (tmp_path / "analysis.json").exists()
    assert json.loads((tmp_path / "results" / "entropy.json").read_text())["result"] == {"value": 1.0}
    fail_at[0] = 5
    found = run(tmp_path, "entropy", "landscape")
    assert rows == [0, 1, 2, 3, 4]  # none twice
    assert found.results["landscape"].pop("measurement")["images"] == "held-out"
    assert found.results["landscape"] == {"value": 10.0, "first": None}
    assert found.seconds["landscape"] == 50.0  # of both runs
    run(tmp_path, "landscape")
    assert len(rows) == 5


def test_what_was_saved_with_other_options_is_not_taken(known, tmp_path):
    stop = [True]
    seen = []

    def measure(given):
        seen.append(dict(given.saved))
        given.save({"rows": [1]})
        if stop[0]:
            raise Stopped
        return {"value": 0.0}

    known.update(landscape=fake("landscape", measure, options=("grid",)))
    with pytest.raises(Stopped):
        run(tmp_path, "landscape")
    stop[0] = False
    run(tmp_path, "landscape", config={"grid": 5})
    assert seen == [{}, {}]


@pytest.mark.parametrize("damage", ["cut", "no seconds", "no result", "list", "partial", "empty"])
def test_a_damaged_result_is_measured_again(damage, known, tmp_path, capsys):
    entropy = Counted()
    known.update(entropy=fake("entropy", entropy))
    run(tmp_path, "entropy")
    file = tmp_path / "results" / "entropy.json"
    text = file.read_text()
    value = json.loads(text)
    changed = {
        "cut": text[: len(text) // 2],
        "no seconds": json.dumps({k: v for k, v in value.items() if k != "seconds"}),
        "no result": json.dumps({"identity": value["identity"]}),
        "list": json.dumps({**value, "result": [1]}),
        "partial": json.dumps({"identity": value["identity"], "partial": {"values": 3, "seconds": 1.0}}),
        "empty": "",
    }
    file.write_text(changed[damage])
    found = run(tmp_path, "entropy")
    assert "entropy.json" in (told := capsys.readouterr().err) and "measured again" in told
    assert len(entropy.saved) == 2 and entropy.saved[1] == {} and found.results["entropy"]["value"] == 1.0
    assert json.loads(file.read_text())["result"] == value["result"]


def test_a_result_of_another_model_is_replaced_without_a_warning(known, tmp_path, capsys):
    known.update(entropy=fake("entropy", Counted()))
    run(tmp_path, "entropy")
    capsys.readouterr()
    run(tmp_path, "entropy", identity={"model": "2", "images": "2"})
    assert "warning" not in capsys.readouterr().err


def test_what_could_not_be_done_is_listed_and_the_rest_goes_on(known, tmp_path, capsys):
    def lacks(given):
        raise UsageError("it has no attention")

    known.update(
        entropy=fake("entropy", lacks), cka=fake("cka"), calibration=fake("calibration", needs={"labels"}),
        noise=fake("noise", needs={"labels", "one-label"}),
    )  # fmt: skip
    given = replace(context(), classes=None)
    found = run_diagnostics(lambda name: given, list(known), tmp_path, label="m", identity={}, facts={})
    assert list(found.results) == list(found.seconds) == ["cka"]
    assert list(found.refused) == ["entropy", "calibration", "noise"]
    assert found.refused["entropy"] == "it has no attention" and "labels" in found.refused["noise"]
    assert capsys.readouterr().err.count("warning: ") == 3
    assert not (tmp_path / "results" / "entropy.json").exists()
    several = replace(context(), multi_label=True)
    found = run_diagnostics(lambda name: several, list(known), tmp_path, label="m", identity={}, facts={})
    assert list(found.results) == ["cka", "calibration"] and "one label" in found.refused["noise"]
    assert json.loads((tmp_path / "analysis.json").read_text())["refused"] == found.refused


def test_images_without_a_result_stop_one_diagnostic_only(known, tmp_path):
    def few(given):
        raise NoResultError("it needs two images or more")

    known.update(ntk=fake("ntk", few), cka=fake("cka"))
    found = run(tmp_path, "ntk", "cka")
    assert found.refused == {"ntk": "it needs two images or more"} and list(found.results) == ["cka"]


def test_the_loss_that_a_diagnostic_does_not_take_is_not_recorded(known, tmp_path):
    taken = {"loss_images": "augmented", "weight_decay": 0.5}
    known.update({"flatness": fake("flatness", options=("weight_decay",)), "miss-rate": fake("miss-rate")})
    found = run(tmp_path, "flatness", "miss-rate", config=taken).results
    recorded = {
        name: (of["measurement"]["loss_images"], of["measurement"]["weight_decay"]) for name, of in found.items()
    }
    assert recorded == {"flatness": ("plain", 0.5), "miss-rate": ("plain", 0.0)}


def test_other_errors_stop_the_run_and_keep_what_is_done(known, tmp_path):
    def broken(given):
        raise RuntimeError("boom")

    known.update(entropy=fake("entropy"), cka=fake("cka", broken))
    with pytest.raises(RuntimeError, match="boom"):
        run(tmp_path, "entropy", "cka")
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["entropy.json"]


def test_only_the_main_process_writes(known, tmp_path, capsys):
    saved = []
    known.update(entropy=fake("entropy", lambda given: saved.append(given.save({"rows": [1]})) or {"value": 4.0}))
    found = run(tmp_path, "entropy", main=False)
    assert found.results["entropy"] == {"value": 4.0} and saved == [None]
    assert list((tmp_path / "results").iterdir()) == [] and not (tmp_path / "analysis.json").exists()
    assert capsys.readouterr().out == ""


def test_options_are_kept_for_comparing(known, tmp_path):
    known.update(landscape=fake("landscape", options=("grid",)), cka=fake("cka"))
    found = run(tmp_path, "landscape", "cka", config={"grid": 5})
    assert found.facts["options"] == {
        "landscape": {"seed": 0, "batch_size": 32, "split": "val", "grid": 5},
        "cka": {"seed": 0, "batch_size": 32, "split": "val"},
    }  # fmt: skip
    assert run(tmp_path, "landscape", "cka", config={"grid": 5}) == found  # of what is taken up too


def test_two_folders_are_drawn_together(known, tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    known.update(
        entropy=fake("entropy", Counted(1.0)), cka=fake("cka", Counted(5.0)), noise=fake("noise", Counted(2.0))
    )
    run(tmp_path / "a", "entropy", "cka")
    run(tmp_path / "b", "cka", "noise")
    both = [read_analysis(tmp_path / "a"), replace(read_analysis(tmp_path / "b"), label="n")]
    drawn = draw(both, tmp_path)
    assert list(drawn) == ["entropy", "cka", "noise"]  # what only one has is drawn alone
    captions = [pictures[0][1] for pictures in drawn.values()]
    assert captions == ["A line for each of m.", "A line for each of m and n.", "A line for each of n."]
    names = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert names == [f"{name}.{kind}" for name in ("cka", "entropy", "noise") for kind in ("png", "svg")]
    assert all(pictures[0][2].startswith(b"\x89PNG") for pictures in drawn.values())


@pytest.mark.parametrize("damage", ["schema", "less", "results", "unknown", "kind", "list"])
def test_a_folder_of_something_else_is_refused(damage, known, tmp_path):
    known.update(entropy=fake("entropy"))
    value = {"schema": 1, **asdict(run(tmp_path, "entropy"))}
    changed = {
        "schema": {**value, "schema": 2},
        "less": {k: v for k, v in value.items() if k != "refused"},
        "results": {**value, "results": {"entropy": 1}},
        "unknown": {**value, "results": {"base": {}}},
        "kind": {**value, "label": 1},
        "list": [value],
    }
    (tmp_path / "analysis.json").write_text(json.dumps(changed[damage]))
    with pytest.raises(DataError, match=r"analysis\.json is not (an|a valid) analysis"):
        read_analysis(tmp_path)


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        (("task", "task"), ("before", "after"), ["before", "after"]),
        (("task", "task"), ("x", "x"), ["task", "task (2)"]),
        (("task", "task"), ("", "x"), ["task", "task (2)"]), (("a", "b"), ("x", "y"), ["a", "b"]),
    ],
    ids=["folders", "same folder", "no name", "labels differ"],
)  # fmt: skip
def test_two_analyses_never_have_one_name(labels, names, expected):
    from vtk.analysis.analyze import _distinct_labels

    assert [one.label for one in _distinct_labels([analysis(label) for label in labels], names)] == expected


@pytest.mark.parametrize("results", [{"calibration": {}}, {"entropy": {"layers": [None]}}])
def test_an_earlier_analysis_that_was_edited_is_one_line(results, tmp_path, capsys):
    from vtk.__main__ import main

    for name, change in (("a", {}), ("b", results)):
        (tmp_path / name).mkdir()
        value = json.loads((V0_1 / "analysis" / "analysis.json").read_text())
        (tmp_path / name / "analysis.json").write_text(json.dumps({**value, "results": {**value["results"], **change}}))
    words = ["analyze", "--compare", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "out")]
    assert main(words) == 3
    assert "an earlier analysis has results that cannot be shown" in capsys.readouterr().err
    assert not (tmp_path / "out" / "report.html").exists()
