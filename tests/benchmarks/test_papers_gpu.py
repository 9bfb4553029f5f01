"""The papers' experiments on a GPU: settings, the plan by counted products, the time limit; tried on the CPU."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from papers import gpu, jobs, runner
from papers.experiment import Experiment
from papers.experiments import EXPERIMENTS, current_settings
from papers.gpu import at_cifar_scale
from papers.image_sets import ImageSet

REPO = Path(__file__).resolve().parents[2]


def test_models_are_wider_and_epochs_fewer_in_the_same_experiments():
    for experiment in EXPERIMENTS:
        here, there = experiment.settings, at_cifar_scale(experiment)
        common, wide = here["common"], there.settings["common"]
        assert wide["batch_size"] == 4 * common["batch_size"] and there.settings["scale"] != here.get("scale")
        own, other = (sum(map(_numbers, (s["common"], s))) for s in (here, there.settings))
        assert other > own and there.on("photographs") == there.settings
        assert there.settings.get("train", {"epochs": 2})["epochs"] >= 2
        assert (there.paper, there.name, there.settings_text()) in current_settings()
    vit = at_cifar_scale(Experiment("A", "x", {"common": {"model_kwargs": ("depth=4", "embed_dim=64")}}, print))
    assert vit.settings["common"]["model_kwargs"] == ("depth=4", "embed_dim=192")


def _numbers(settings):
    words = [w for v in settings.values() if isinstance(v, tuple) for w in v if isinstance(w, str)]
    return sum(
        int(n)
        for w in words
        for n in w.replace("[", "=").replace("]", "").replace(",", "=").split("=")
        if n.isdecimal()
    )


def test_a_plan_counts_the_runs_that_experiments_share_once():
    def run(job):
        for name, options in (("plain", {}), ("sam", {"sam": 0.05}), ("half", {"data": job.images / "first"})):
            done = job.train(name, epochs=3, **options)
            assert done.weights is None  # so nothing is measured

    both = [Experiment(p, "x", {"common": {"model": "m"}}, run) for p in "AB"]
    found = gpu.plan(both, 5, 1000, lambda options: 7)
    assert (found.runs, found.images) == (15, 5 * (3000 + 3000 + 1500))
    assert found.flops == 5 * 7 * 3 * (3000 + 2 * 3000 + 1500)


def test_products_of_a_vit_are_those_of_its_formula():
    width, depth, tokens, patch = 64, 2, 17, 8
    kwargs = (f"patch_size={patch}", f"embed_dim={width}", f"depth={depth}", "num_heads=2")
    options = {"model": "vit_tiny_patch16_224", "img_size": 32, "epochs": 3, "lr": 1.0, "model_kwargs": kwargs}
    layers = 2 * 12 * width**2 * tokens + 2 * 2 * tokens**2 * width
    expected = 2 * 3 * patch**2 * width * (tokens - 1) + depth * layers + 2 * width * 10
    assert gpu.forward_flops(options) == expected


@pytest.mark.slow
def test_five_seeds_of_everything_are_planned_within_the_time_limit():
    plan = gpu.plan([at_cifar_scale(e) for e in EXPERIMENTS], 5, gpu.TRAIN, gpu.forward_flops)
    # start-up, evaluation and measures come on top of the plan's seconds
    assert plan.seconds <= 0.6 * 60 * gpu.MINUTES and "assumed, not measured" in str(plan)


class Endless:
    returncode = 0
    ended = 0

    def poll(self):
        return None

    def terminate(self):
        type(self).ended += 1


def test_jobs_that_run_at_the_time_limit_are_ended_and_the_rest_not_started(tmp_path, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(jobs.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(jobs.time, "sleep", lambda s: None)
    monkeypatch.setattr(jobs, "start", lambda task, place: Endless())
    tasks = [jobs.Task(EXPERIMENTS[0], ImageSet("x", None, 1, 1), seed) for seed in range(5)]
    failed, left = jobs.work_off(tasks, jobs.Place(tmp_path, tmp_path / "r.csv"), 2, end=9)
    assert (failed, left, Endless.ended) == ([], 5, 2)


@pytest.mark.parametrize("arguments, words", [
    ([], "--gpu needs photographs"), (["--images", "digits"], "--gpu needs photographs"),
    (["--images", "HERE"], "no CUDA device"),
])  # fmt: skip
def test_without_photographs_or_a_gpu_it_says_so(tmp_path, arguments, words, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
    with pytest.raises(SystemExit):
        runner.main(["--gpu", *(str(tmp_path) if a == "HERE" else a for a in arguments)])
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_the_gpus_settings_run_here_in_small(tmp_path):
    for part, count in (("train", 12), ("val", 4)):
        for name in "abcd":
            (tmp_path / "in" / part / name).mkdir(parents=True)
            for i in range(count):
                from PIL import Image

                Image.new("RGB", (32, 32), (20 * i, 40, 90)).save(tmp_path / "in" / part / name / f"{i}.png")
    command = [sys.executable, str(REPO / "benchmarks" / "papers"), "--gpu", "--quick", "--skip-tests", "--seeds", "0"]
    command += ["--images", f"Plain={tmp_path / 'in'}", "--train", "40", "--val", "16", "--only", "A/parallel", "D"]
    command += ["--work", str(tmp_path / "w"), "--results", str(tmp_path / "r.csv"), "--processes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    logs = "".join(log.read_text()[-1500:] for log in (tmp_path / "w" / "jobs").glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    with (tmp_path / "r.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(r["paper"], r["data"]) for r in rows} == {("A", "Plain on a GPU"), ("D", "Plain on a GPU")}
    assert all("embed_dim=192" in r["settings"] for r in rows) and any(r["metric"] == "lambda_max" for r in rows)
