"""`make papers`: the rule, the images, what counts as done, and the page. Its runs are tried in a slow test."""

import csv
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from papers import experiments, image_sets, jobs, pictures, runner, schedule
from papers.claims import CLAIMS, Claim
from papers.experiment import Experiment, Job
from PIL import Image

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def page():
    """docs/_generate/papers.py, whose name is also that of the benchmarks' package."""
    spec = importlib.util.spec_from_file_location("papers_page", REPO / "docs" / "_generate" / "papers.py")
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_images_are_always_the_same_of_every_class_alike_and_no_original_is_in_both_parts(tmp_path):
    for name in ("a", "b"):
        folder = pictures.prepare(tmp_path / name, None, 40, 20)
    counts = {part: [len(list(c.iterdir())) for c in (folder / "all" / part).iterdir()] for part in ("train", "val")}
    assert counts == {"train": [4] * 10, "val": [2] * 10}
    first = {p.relative_to(tmp_path / "a"): p.read_bytes() for p in (tmp_path / "a").rglob("*.png")}
    assert first == {p.relative_to(tmp_path / "b"): p.read_bytes() for p in (tmp_path / "b").rglob("*.png")}
    numbers = {part: {p.stem for p in (folder / "all" / part).rglob("*.png")} for part in ("train", "val")}
    assert not numbers["train"] & numbers["val"] and len(numbers["train"]) == 40
    image = Image.open(next(folder.rglob("*.png")))
    assert image.size == (32, 32) and image.mode == "RGB" and np.asarray(image).std() > 20
    halves = [sorted(p.name for p in (folder / half / "val").iterdir()) for half in ("first", "second")]
    assert halves == [list("01234"), list("56789")]


def test_images_of_a_folder_are_as_many_of_each_class_and_prepared_anew_when_more_are_asked_for(tmp_path):
    for part, count in (("train", 9), ("val", 5)):
        for name in ("ant", "bee"):
            (tmp_path / "in" / part / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (8, 8), (i * 20, 0, 0)).save(tmp_path / "in" / part / name / f"{i}.png")
    for train, expected in ((6, 3), (8, 4)):
        folder = pictures.prepare(tmp_path / "out", tmp_path / "in", train, 4)
        found = {p.relative_to(folder) for p in folder.glob("all/*/*/*")}
        assert len(found) == 2 * expected + 4
        assert len(list((folder / "second" / "train" / "bee").iterdir())) == expected


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Two experiments that only count, in place of the real ones; jobs run in this process."""
    done = []

    def run(job):
        done.append((job.settings["name"], job.seed))
        job.add("one", top1=0.5 + job.seed / 10)
        job.add("two", top1=0.4 + (job.seed % 3) / 10)

    made = tuple(
        Experiment(p, "x", {"name": p, "train": {"epochs": 3}}, run, {"name": f"{p} photographs"} if p == "B" else None)
        for p in "AB"
    )
    monkeypatch.setattr(runner, "EXPERIMENTS", made)
    monkeypatch.setattr(runner.pictures, "prepare", lambda *a: None)

    class Process:
        def __init__(self, code):
            self.returncode = code

        def poll(self):
            return self.returncode

    monkeypatch.setattr(jobs, "start", lambda task, place: Process(jobs.do(task, place) or 0))
    monkeypatch.setattr(jobs.time, "sleep", lambda s: None)
    arguments = ["--skip-tests", "--results", str(tmp_path / "r.csv"), "--work", str(tmp_path / "w")]
    return done, lambda *more: runner.main([*arguments, *more])


def rows_in(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_finished_experiment_is_not_done_again_unless_its_settings_or_images_change(fake, tmp_path, monkeypatch):
    done, go = fake
    assert go("--seeds", "0", "1", "--only", "A") == 0 and done == [("A", 0), ("A", 1)]
    assert go("--seeds", "0", "1", "2") == 0 and sorted(done[2:]) == [("A", 2), ("B", 0), ("B", 1), ("B", 2)]
    assert go("--seeds", "0", "1", "2") == 0 and len(done) == 6
    assert go("--train", "500", "--only", "B/x", "--seeds", "0") == 0 and done[6:] == [("B", 0)]
    assert go("--again", "--only", "B", "--seeds", "1") == 0 and done[7:] == [("B", 1)]
    first, second = runner.EXPERIMENTS
    monkeypatch.setattr(runner, "EXPERIMENTS", (replace(first, settings={"name": "A", "lr": 2}), second))
    assert go("--seeds", "0") == 0 and done[8:] == [("A", 0)]
    rows = [row for row in rows_in(tmp_path / "r.csv") if row["variant"] == "one"]
    assert len(rows) == 9 and {r["metric"] for r in rows} == {"top1"}
    assert float(rows[1]["value"]) == 0.6 and rows[0]["train_images"] == "1000" and rows[0]["git"] and rows[0]["device"]


def test_dry_does_nothing_and_unknown_names_and_quick_results_are_refused(fake, tmp_path, capsys):
    done, go = fake
    assert go("--dry", "--seeds", "4") == 0 and not done
    assert "A/x seed 4" in capsys.readouterr().out and not (tmp_path / "r.csv").exists()
    for wrong in (["--only", "Z"], ["--quick", "--results", str(runner.RESULTS)], ["--again"], ["--images", "none"]):
        with pytest.raises(SystemExit):
            go(*wrong)


def test_a_job_that_fails_is_named_and_leaves_no_rows(fake, tmp_path, monkeypatch, capsys):
    _, go = fake
    good = jobs.start
    failed = type("P", (), {"returncode": 3, "poll": lambda self: 3})
    monkeypatch.setattr(jobs, "start", lambda t, p: failed() if t.experiment.paper == "A" else good(t, p))
    assert go("--seeds", "0") == 1
    assert "FAILED A/x seed 0" in capsys.readouterr().out
    assert {row["paper"] for row in rows_in(tmp_path / "r.csv")} == {"B"}


def test_a_run_that_was_done_is_not_trained_again_and_a_torn_one_is(tmp_path, monkeypatch):
    import vtk.training.train as module

    calls = []

    class Found:
        model_last = tmp_path / "m.safetensors"
        run = type("R", (), {"rows": [{"val_top1": 0.3, "val_loss": 2.0, "loss": 1.0, "images_per_second": 9.0}]})

    monkeypatch.setattr(module, "train", lambda config: calls.append(config) or Found)
    (tmp_path / "images" / "all" / "train").mkdir(parents=True)
    job = Job({"common": {"img_size": 32}}, tmp_path / "images", {}, 0.5, 7, tmp_path)
    first = job.train("run", epochs=2)
    assert calls[0].seed == 7 and calls[0].epochs == 2 and calls[0].img_size == 32
    assert job.train("run", epochs=2) == first and len(calls) == 1
    other = replace(job, settings={"common": {"img_size": 32, "epochs": 2}, "train": {}})
    assert other.train("of another experiment") == first and len(calls) == 1
    for change in ({"described": {"train": 500}}, {"seed": 8}, {"since": time.time() + 9}):
        before = len(calls)
        replace(job, **change).train("run", epochs=2)
        assert len(calls) == before + 1
    (mark,) = [p for p in tmp_path.glob("*.json") if json.loads(p.read_text())["run"] == calls[0].out.name]
    mark.unlink()  # as if the run had been killed
    calls[0].out.mkdir()
    (calls[0].out / "part").touch()
    assert job.train("run", epochs=2).numbers["top1"] == 0.3 and not calls[0].out.exists()
    assert (
        first.numbers["seconds"] >= 0
        and first.numbers["cpu_seconds"] >= 0
        and first.numbers["top1"] == 0.3
        and first.weights == tmp_path / "m.safetensors"
    )


def test_a_run_that_diverges_counts_as_chance_and_has_no_model(tmp_path, monkeypatch):
    import vtk.training.train as module
    from vtk.training.engine.fitting import DivergedError

    def diverge(config):
        raise DivergedError("loss is nan")

    monkeypatch.setattr(module, "train", diverge)
    for name in "abcd":
        (tmp_path / "images" / "all" / "train" / name).mkdir(parents=True)
    found = Job({"common": {}}, tmp_path / "images", {}, 0.0, 0, tmp_path).train("run")
    assert found.weights is None and (found.numbers["top1"], found.numbers["diverged"]) == (0.25, 1.0)


def rows_of(values, code, **changes):
    """Rows of Chen et al. 2022's experiment: metric → variant → values of the seeds."""
    settings = json.dumps(dict(runner.EXPERIMENTS[-2].settings), sort_keys=True)
    head = {
        "paper": "D",
        "experiment": "sam",
        "data": "pets",
        "train_images": "1000",
        "digest": "d1",
        "settings": settings,
    }
    return [
        {**head, "variant": variant, "seed": str(seed), "metric": metric, "value": str(value), **code, **changes}
        for metric, variants in values.items() for variant, own in variants.items() for seed, value in enumerate(own)
    ]  # fmt: skip


def test_the_page_says_what_the_rows_say(page, code):
    values = {
        "top1": {"AdamW": (0.30, 0.32, 0.31, 0.31, 0.31), "SAM": (0.31, 0.30, 0.32, 0.31, 0.31)},
        "lambda_max": {"AdamW": (100.0, 120.0, 110.0, 100.0, 120.0), "SAM": (20.0, 22.0, 24.0, 24.0, 20.0)},
        "noisy_loss": {"AdamW": (1.0, 1.1, 1.2, 1.1, 1.1), "SAM": (2.0, 2.2, 2.4, 2.1, 2.3)},
        "diverged": {"AdamW": (0,) * 5, "SAM": (0,) * 5},
    }
    text = page.page(rows_of(values, code))
    assert "| Chen et al. 2022 | SAM lowers the largest curvature λ_max | shown |" in text
    assert "| Chen et al. 2022 | SAM lowers the loss under weight noise, L^N | reversed |" in text
    assert "| Chen et al. 2022 | SAM lowers the miss rate half-way between images | not measured |" in text
    assert "| AdamW | 31.0 ± 0.7 | 110.0 ± 10.0 |" in text and "diverged" not in text
    assert "commit abc" in text and "seeds 0, 1, 2, 3, 4" in text
    assert "## AlterNet" not in text and text == page.page(rows_of(values, code))


def test_of_several_settings_the_last_counts_and_images_are_apart(page, code):
    def of(value, **changes):
        return rows_of({"top1": {"AdamW": (value,) * 2, "SAM": (value,) * 2}}, code, **changes)

    text = page.page([*of(0.9), *of(0.4, digest="d2"), *of(0.7, data="cars")])
    assert "**pets**" in text and "**cars**" in text and "40.0 ± 0.0" in text and "70.0" in text
    assert "90.0" not in text
    assert "| paper | claim | pets | cars |" in text


def test_without_results_the_page_promises_nothing(page):
    assert "Not measured yet." in page.page([]) and "shown |" not in page.page([])


def test_every_claim_is_of_an_experiment_that_there_is_and_of_a_metric_with_a_name(page):
    known = {(e.paper, e.name) for e in runner.EXPERIMENTS}
    assert {(c.paper, c.experiment) for c in CLAIMS} <= known == set(page.TITLES) == set(page.TEXT)
    assert all(c.metric in page.NAMES for c in CLAIMS)
    for experiment in runner.EXPERIMENTS:  # the bound
        words = " ".join(experiment.settings["common"].get("model_kwargs", experiment.settings.get("kwargs")))
        widths = [int(n) for n in words.replace("[", " ").replace("]", " ").replace(",", " ").replace("=", " ").split()
                  if n.isdecimal()]  # fmt: skip
        assert max(widths) <= 192 and pictures.TRAIN <= 1000


@pytest.mark.slow
def test_every_experiment_runs_and_gives_what_the_claims_are_about(tmp_path):
    command = [sys.executable, str(REPO / "benchmarks" / "papers"), "--quick", "--skip-tests", "--seeds", "0"]
    command += ["--train", "40", "--val", "20", "--work", str(tmp_path), "--results", str(tmp_path / "r.csv")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    logs = "".join(log.read_text()[-1500:] for log in (tmp_path / "jobs").glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    with (tmp_path / "r.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(r["paper"], r["experiment"], r["variant"], r["metric"]) for r in rows}
    for claim in CLAIMS:
        for variant in (claim.variant, claim.against):
            assert (claim.paper, claim.experiment, variant, claim.metric) in found, claim
    assert all(math.isfinite(float(r["value"])) for r in rows if r["metric"] != "top1")
