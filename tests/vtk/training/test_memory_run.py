"""``vtk finetune --memory`` and ``--dry-run``: what a run takes, writes down, resumes with and says."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vtk.commands import finetune as command
from vtk.errors import UsageError
from vtk.training import memory
from vtk.training.finetune import finetune, memory_report
from vtk.training.finetune_config import MODES

FLAGS = (
    "--model", "vit_tiny_patch16_224", "--model-kwargs", "depth=2,embed_dim=32,num_heads=2", "--no-pretrained",
    "--img-size", "32", "--batch-size", "8", "--lr", "2e-3", "--workers", "0", "--device", "cpu", "--epochs", "2",
)  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_mode_trains_alike(config, tmp_path, precision):
    """Exact modes give the same pack, byte for byte; GELU in bytes the same accuracy."""
    shared = {"precision": precision, "epochs": 3, "drop_path": 0.1, "accumulate": 2}
    runs = {m: finetune(config(memory=m, out=tmp_path / m, **shared)) for m in MODES}
    assert {m: r.memory for m, r in runs.items()} == {m: m for m in MODES}
    plain = runs["plain"]
    assert plain.metrics.top1 >= 0.6
    for mode, run in runs.items():
        assert abs(run.metrics.top1 - plain.metrics.top1) <= 0.01, mode
        if mode != "act8":
            for file in ("task.safetensors", "task.json"):
                assert (run.task_last / file).read_bytes() == (plain.task_last / file).read_bytes(), (mode, file)
    assert "--memory act8" in (runs["act8"].task / "task.json").read_text()


def test_auto_writes_down_and_says_what_it_took(config, monkeypatch, capsys):
    result = finetune(config(memory="auto", epochs=1))
    assert result.to_dict()["memory"] == "plain" and result.to_dict()["batch_size"] == 8
    saved = yaml.safe_load((result.out / "config.yaml").read_text())
    assert (saved["memory"], saved["batch_size"]) == ("plain", 8)
    assert "memory mode plain, batch 8: a step takes about" in capsys.readouterr().out


def test_a_batch_that_leaves_few_steps_is_pointed_out(config, monkeypatch, capsys):
    monkeypatch.setattr(memory, "_largest_batch", lambda *args: 16)
    finetune(config(batch_size="auto", epochs=1, memory="plain"))
    said = " ".join(capsys.readouterr().err.split())
    assert "`--batch-size auto` takes 16 of" in said and "a smaller --batch-size learns more from small data" in said
    finetune(config(batch_size=16, epochs=1, memory="plain", overwrite=True))
    assert "takes 16 of" not in capsys.readouterr().err


def test_a_resumed_run_keeps_its_mode_and_batch(config, monkeypatch, tmp_path):
    room = [10**5]
    monkeypatch.setattr(memory, "free_bytes", lambda device: room[0])
    monkeypatch.setattr(memory, "_largest_batch", lambda *args: 8)
    whole = finetune(config(out=tmp_path / "whole", memory="minimal"))
    first = finetune(config(out=tmp_path / "parts", stop_after=1, batch_size="auto"))
    assert (first.memory, first.batch_size) == ("minimal", 8)
    room[0] = 1 << 40
    second = finetune(config(out=tmp_path / "parts", resume=True, batch_size="auto"))
    assert (second.memory, second.batch_size) == ("minimal", 8)
    names = [r.task_last / "task.safetensors" for r in (whole, second)]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_resuming_with_another_mode(config):
    finetune(config(memory="plain", stop_after=1))
    with pytest.raises(UsageError, match=r"--memory act8 \(was plain\)"):
        finetune(config(memory="act8", resume=True))
    assert finetune(config(memory="minimal", resume=True)).memory == "minimal"


@pytest.mark.parametrize(("extra", "words"), [
    (["--memory", "act8", "--train", "attn+norm"], "--memory act8 changes nothing: norms are trained"),
    (["--memory", "minimal", "--train", "head"], "no weight at or before the blocks is trained"),
    (["--memory", "recompute", "--model-kwargs", "depth=2,embed_dim=32,num_heads=2,act_layer=relu"],
     "not GELU or SiLU"),
    (["--train", "attn+norm"], None),
    (["--train", "attn"], None),
])  # fmt: skip
def test_one_line_says_what_is_not_done(photos, tmp_path, capsys, extra, words):
    argv = [str(photos), *FLAGS, "--out", str(tmp_path / "run"), "--epochs", "1", *extra]
    assert command.main(argv) == 0
    err = [line for line in capsys.readouterr().err.splitlines() if "memory" in line]
    assert len(err) == (words is not None)
    assert words is None or words in err[0]


def test_dry_run_shows_the_table_and_writes_nothing(photos, tmp_path, capsys):
    out = tmp_path / "run"
    assert command.main([str(photos), *FLAGS, "--out", str(out), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    table = printed.partition("Memory of a training step")[2]
    assert not out.exists() and max(map(len, table.splitlines())) <= 80
    assert all(mode in table for mode in MODES) and "→ plain" in table
    assert command.main([str(photos), *FLAGS, "--out", str(out), "--dry-run", "--json", "--memory", "act8"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not out.exists() and told["memory"] == "act8" and [m["mode"] for m in told["modes"]] == list(MODES)
    units = [m["units"] for m in told["modes"]]
    assert units == sorted(units, reverse=True)


def test_dry_run_of_what_the_engine_does_not_know(photos, tmp_path, capsys):
    argv = [str(photos), *FLAGS, "--out", str(tmp_path / "run"), "--dry-run", "--json", "--train", "full"]
    assert command.main(argv) == 0
    told = json.loads(capsys.readouterr().out)
    assert [m["mode"] for m in told["modes"]] == ["plain"] and "norms are trained" in told["note"]


def test_dry_run_leaves_an_earlier_run_alone(config, tmp_path):
    result = finetune(config(epochs=1, memory="plain"))
    before = {p: p.stat().st_mtime_ns for p in result.out.rglob("*")}
    assert memory_report(config(dry_run=True)).mode == "plain"
    assert {p: p.stat().st_mtime_ns for p in result.out.rglob("*")} == before
    with pytest.raises(UsageError, match="memory_report"):
        finetune(config(dry_run=True))


@pytest.mark.slow
def test_two_processes_train_as_one(config, photos, tmp_path):
    """DDP over gloo, with accumulation: both processes take the same mode, and the loss is that of one."""
    torchrun = shutil.which("torchrun") or str(Path(sys.executable).with_name("torchrun"))
    run = [torchrun, "--standalone", "--nproc_per_node", "2", "-m", "vtk", "finetune", str(photos), *FLAGS]
    flags = ["--accumulate", "2", "--head-lr-mult", "1", "--memory", "minimal", "--out", str(tmp_path / "two")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*run, *flags], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    one = finetune(config(accumulate=2, memory="minimal", out=tmp_path / "one"))
    rows = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    for mine, theirs in zip(one.rows, rows, strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-4)
    assert yaml.safe_load((tmp_path / "two" / "config.yaml").read_text())["memory"] == "minimal"


@pytest.mark.slow
def test_benchmarks_write_what_they_promise(tmp_path):
    folder = Path(__file__).resolve().parents[3] / "benchmarks"
    flags = ["--count-size", "32", "--regimes", "bf16 regime", "--rounds", "1", "--depth", "1", "--size", "32"]
    commands = {
        "memory.csv": ["memory.py", *flags, "--skip-tests", "--results", str(tmp_path / "memory.csv")],
        "smoke_train.csv": ["train.py", "--smoke", "--out", str(tmp_path)],
    }
    for file, (script, *arguments) in commands.items():
        command_line = [sys.executable, str(folder / script), *arguments]
        done = subprocess.run(command_line, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        with (tmp_path / file).open(newline="") as opened:
            rows = list(csv.DictReader(opened))
        names = [row.get("mode") or row.get("config", "").removeprefix("attn, ") for row in rows]
        assert set(MODES) < set(names) and "git" in rows[0]
