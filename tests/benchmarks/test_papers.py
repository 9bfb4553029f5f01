"""`make papers`: the two looks, what counts as done, and several runners. Its runs are tried in a slow test."""

import csv
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from papers import image_sets, jobs, runner, schedule
from papers.claims import CLAIMS, Claim
from papers.experiment import Experiment

from vtk.locks import hold_folder

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Two experiments that only count, in place of the real ones; jobs run in this process."""
    done = []

    def run(job):
        done.append((job.settings["name"], job.seed))
        job.add("one", top1=0.5 + job.seed / 10)
        job.add("two", top1=0.3 + job.seed / 10 + job.seed % 3 / 100)
        job.add("half", top1=0.3 + job.seed / 10 + (-1) ** job.seed / 10)

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

        def terminate(self):
            pass

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


def test_ten_seeds_are_run_where_five_leave_a_claim_open_and_a_stopped_runner_goes_on(fake, tmp_path, monkeypatch):
    done, go = fake
    claims = (
        Claim("A", "x", "clear", "top1", "one", "two", 1),
        Claim("B", "x", "clear", "top1", "one", "two", 1),
        Claim("B", "x", "not clear", "top1", "two", "half", 1),
    )
    monkeypatch.setattr(schedule, "CLAIMS", claims)
    good = jobs.start
    killed = iter([False] * 7)

    def start(task, place):
        if next(killed, True):
            raise KeyboardInterrupt
        return good(task, place)

    monkeypatch.setattr(jobs, "start", start)
    with pytest.raises(KeyboardInterrupt):
        go()
    # of two jobs at a time, each has a seed of its own
    assert done == [("A", 0), ("A", 1), ("B", 0), ("B", 1), ("A", 2), ("A", 3), ("A", 4)]
    monkeypatch.setattr(jobs, "start", good)
    assert go() == 0 and len(done) == len(set(done)) + len({("A", 4)} & set(done[7:]))
    assert {d for d in done if d[0] == "A"} == {("A", seed) for seed in range(5)}
    assert {d for d in done if d[0] == "B"} == {("B", seed) for seed in range(10)}
    before = len(done)
    assert go() == 0 and len(done) == before


def test_jobs_that_run_at_the_same_time_have_different_seeds(fake):
    pairs = [(e, image_sets.parse("digits", 10, 5)) for e in runner.EXPERIMENTS]
    order = [(t.experiment.paper, t.seed) for t in schedule.missing(pairs, range(5), [], abreast=2)]
    assert order[:4] == [("A", 0), ("A", 1), ("B", 0), ("B", 1)] and len(set(order)) == 10
    assert all(one[1] != two[1] for one, two in itertools.pairwise(order))
    assert len(schedule.missing(pairs, [7], [], abreast=2)) == 2 and schedule.missing(pairs, [], []) == []


def test_settings_that_are_edited_while_jobs_run_end_the_runner(fake, monkeypatch, capsys):
    _, go = fake
    good = jobs.do

    def edited(task, place):
        own = replace(task, experiment=replace(task.experiment, settings={"name": "edited"}))
        good(own, place, place.result(task))

    monkeypatch.setattr(jobs, "do", edited)
    assert go("--seeds", "0") == 1
    assert "A/x seed 0 on cluttered digits was done with other settings" in capsys.readouterr().out


def test_photographs_are_run_with_settings_of_their_own_where_an_experiment_has_them(fake, tmp_path):
    done, go = fake
    for part in ("train", "val"):
        (tmp_path / "pets" / part).mkdir(parents=True)
    folder = f"Pets, small={tmp_path / 'pets'}"
    assert go("--images", "digits", folder, "--seeds", "0") == 0
    assert sorted(done) == [("A", 0), ("B", 0), ("B photographs", 0)]
    rows = rows_in(tmp_path / "r.csv")
    assert {(r["paper"], r["data"], json.loads(r["settings"])["name"]) for r in rows} == {
        ("A", "cluttered digits", "A"), ("B", "cluttered digits", "B"), ("B", "Pets, small", "B photographs"),
    }  # fmt: skip
    assert go("--images", folder, "--seeds", "0") == 0 and len(done) == 3
    with pytest.raises(SystemExit):
        go("--images", "digits", "digits")
    digits, pets = (image_sets.parse(word, 10, 5) for word in ("digits", str(tmp_path / "pets")))
    assert (digits.hflip, pets.hflip, pets.name) == (0.0, 0.5, "pets") and image_sets.parse(pets.word, 10, 5) == pets


def test_a_second_runner_in_the_same_folder_is_refused_in_one_line(fake, tmp_path, capsys):
    _, go = fake
    (tmp_path / "w").mkdir()
    with hold_folder(tmp_path / "w", "another"):
        assert go("--seeds", "0") == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "`--work`" in error and "is being written by `another`" in error
    assert go("--seeds", "0") == 0


def test_runners_that_share_a_results_file_lose_no_rows(tmp_path):
    path = tmp_path / "r.csv"
    threads = [
        threading.Thread(target=lambda k=k: [jobs.append(path, [{"runner": k, "n": n}]) for n in range(6)])
        for k in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(r["runner"], r["n"]) for r in rows_in(path)} == {(str(k), str(n)) for k in range(3) for n in range(6)}
    assert [p.name for p in tmp_path.iterdir()] == ["r.csv"]


@pytest.mark.slow
def test_a_job_ends_when_the_runner_that_started_it_is_killed(tmp_path):
    child = "import time; from papers.jobs import end_with_parent; end_with_parent(); print('up', flush=True)"
    child += "; time.sleep(60)"
    parent = f"import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True)"
    parent += "; time.sleep(60)"
    environment = {**os.environ, "PYTHONPATH": str(REPO / "benchmarks")}
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, env=environment
    ) as runner_:
        pid = int(runner_.stdout.readline())
        assert runner_.stdout.readline() == "up\n"
        runner_.kill()
        for _ in range(200):
            if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
            time.sleep(0.1)
    pytest.fail("the job is still there after 20 s")


def test_dry_does_nothing_and_unknown_names_and_quick_results_are_refused(fake, tmp_path, capsys):
    done, go = fake
    assert go("--dry", "--seeds", "4") == 0 and not done
    assert "A/x seed 4" in capsys.readouterr().out and not (tmp_path / "r.csv").exists()
    for wrong in (["--only", "Z"], ["--quick", "--results", str(runner.RESULTS)], ["--again"], ["--images", "none"]):
        with pytest.raises(SystemExit):
            go(*wrong)


def test_results_that_were_cut_are_refused_before_anything_is_done(fake, tmp_path, capsys):
    done, go = fake
    assert go("--seeds", "0", "--only", "A") == 0 and len(done) == 1
    text = (tmp_path / "r.csv").read_text()
    (tmp_path / "r.csv").write_text(text[: text.rindex("top1") + 6])
    with pytest.raises(SystemExit):
        go("--seeds", "0", "1")
    assert "has a row that was cut; remove it" in capsys.readouterr().err and len(done) == 1


def test_a_job_that_fails_is_named_and_leaves_no_rows(fake, tmp_path, monkeypatch, capsys):
    _, go = fake
    good = jobs.start
    failed = type("P", (), {"returncode": 3, "poll": lambda self: 3})
    monkeypatch.setattr(jobs, "start", lambda t, p: failed() if t.experiment.paper == "A" else good(t, p))
    assert go("--seeds", "0") == 1
    assert "FAILED A/x seed 0" in capsys.readouterr().out
    assert {row["paper"] for row in rows_in(tmp_path / "r.csv")} == {"B"}


@pytest.mark.slow
@pytest.mark.parametrize("paper", "ABCDE")
def test_every_experiment_runs_and_gives_what_the_claims_are_about(paper, tmp_path):
    command = [sys.executable, str(REPO / "benchmarks" / "papers"), "--quick", "--skip-tests", "--seeds", "0"]
    command += ["--only", paper, "--train", "40", "--val", "20"]
    command += ["--work", str(tmp_path), "--results", str(tmp_path / "r.csv")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    logs = "".join(log.read_text()[-1500:] for log in (tmp_path / "jobs").glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    with (tmp_path / "r.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(r["paper"], r["experiment"], r["variant"], r["metric"]) for r in rows}
    for claim in (claim for claim in CLAIMS if claim.paper == paper):
        for variant in (claim.variant, claim.against):
            assert (claim.paper, claim.experiment, variant, claim.metric) in found, claim
    assert all(math.isfinite(float(r["value"])) for r in rows if r["metric"] != "top1")
