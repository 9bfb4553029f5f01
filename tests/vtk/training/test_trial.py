"""Trials: a part of the images, a few steps, a look before a run; and what a run that is complete leaves behind."""

import csv
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.vtk._faults import tree
from vtk.__main__ import main
from vtk.data.audit.result import DataAudit, Sample
from vtk.errors import DataError, UsageError
from vtk.packs.cards import read_card
from vtk.packs.load import load_task
from vtk.training.engine.callbacks import Callback
from vtk.training.finetune import finetune, finetune_tasks
from vtk.training.preview import dry_run, duration
from vtk.training.runs.limit import limit_images
from vtk.training.runs.writer import link_file


@pytest.fixture
def config(config):
    """Runs of one block."""
    return lambda **changes: config(**{"model_kwargs": ("depth=1", "embed_dim=16", "num_heads=2"), **changes})


def audit(*counts, val=()):
    def samples(sizes):
        return tuple(Sample(Path(f"{label}/{i}"), label) for label, count in enumerate(sizes) for i in range(count))

    return DataAudit(Path(), "split", tuple(map(str, range(len(counts)))), samples(counts), samples(val))


@pytest.mark.parametrize(
    ("counts", "limit", "wanted"),
    [
        ((60, 30, 10), 10, (6, 3, 1)),
        ((60, 30, 10), 50, (30, 15, 5)),
        ((97, 1, 1, 1), 10, (7, 1, 1, 1)),  # a rare class keeps an image
        ((5, 5), 100, (5, 5)),
        ((4, 0, 4), 2, (1, 0, 1)),
    ],
)
def test_classes_keep_their_proportions(counts, limit, wanted):
    found = limit_images(audit(*counts, val=counts), limit, seed=3)
    for part in (found.train, found.val):
        kinds = Counter(sample.label for sample in part)
        assert tuple(kinds[i] for i in range(len(counts))) == wanted
        assert list(part) == sorted(part, key=lambda s: (s.label, int(s.path.name)))  # in the order that they had
    assert bool(found.notes) == (sum(wanted) < sum(counts))


def test_a_part_follows_from_the_seed_and_may_be_smaller_than_the_classes():
    whole = audit(*[3] * 20, val=[2] * 20)
    one, again, other = (limit_images(whole, 7, seed) for seed in (1, 1, 2))
    assert one.train == again.train != other.train and one.val == again.val
    assert len(one.train) == len(one.val) == 7 and len({s.label for s in one.train}) == 7
    assert limit_images(whole, None, 1) is whole
    several = DataAudit(
        Path(), "flat", ("a", "b"), tuple(Sample(Path(str(i)), np.array([i % 2, 1])) for i in range(9)), ()
    )
    assert len(limit_images(several, 4, 0).train) == 4


def rows_of(out):
    with (out / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_limited_run_says_what_its_metric_is_of(config, capsys):
    result = finetune(config(limit=6, epochs=1))
    said = capsys.readouterr().out
    assert "a trial on 6 of 36 training images and 6 of 15 held-out ones (--limit 6)" in said
    assert "of 6 images, a trial with --limit 6; pack" in said
    card = read_card(result.task)
    assert card.data["limit"] == 6 and card.metrics["count"] == 6 and "--limit 6" in card.command
    assert [row["limit"] for row in rows_of(result.out)] == ["6.0"] and result.to_dict()["limit"] == 6
    assert "limit" not in read_card(finetune(config(epochs=1, overwrite=True)).task).data
    with pytest.raises(UsageError, match=r"these differ: --limit 7 \(was None\)"):
        finetune(config(epochs=1, limit=7, resume=True))


def test_a_run_of_few_steps_has_their_schedule(config):
    rates = []

    class Rates(Callback):
        def on_step(self, info):
            rates.append((info.epoch, info.step, info.lr))

    result = finetune(config(epochs=5, max_steps=7, warmup=0.0), callbacks=[Rates()])  # five steps an epoch
    assert [(epoch, step) for epoch, step, _ in rates] == [(1 + i // 5, i + 1) for i in range(7)]
    assert [rate for *_, rate in rates] == pytest.approx(
        [2e-3 * 0.5 * (1 + math.cos(math.pi * i / 7)) for i in range(7)]
    )
    assert len(result.rows) == 2 and not result.stopped_early and result.to_dict()["max_steps"] == 7
    load_task(result.task_last)
    assert read_card(result.task).data["max_steps"] == 7
    again = finetune(config(epochs=5, max_steps=7, warmup=0.0, resume=True))
    assert again.rows == result.rows
    long = finetune(config(epochs=1, max_steps=99, overwrite=True))
    assert len(long.rows) == 1


@pytest.mark.slow
def test_few_steps_of_several_tasks_need_one_of_each(config, photos, tmp_path):
    few = tmp_path / "few"
    for part in ("train", "val"):
        for name in ("blue", "red"):
            (few / part / name).mkdir(parents=True)
            (few / part / name / "0.png").symlink_to(photos / part / name / "0.png")
    flags = {"data": None, "tasks": (f"a={photos}", f"b={few}"), "batch_size": 4, "epochs": 2}
    found = finetune_tasks(config(max_steps=9, **flags))
    assert {name: len(run.rows) for name, run in found.tasks.items()} == {"a": 1, "b": 1}
    with pytest.raises(UsageError, match=r"`--max-steps` 1: task `b` has no step in epoch 1 before that; give 9"):
        finetune_tasks(config(max_steps=1, out=tmp_path / "one", **flags))


def test_a_complete_run_keeps_one_copy_of_equal_packs(config, tmp_path):
    result = finetune(config(epochs=1))
    for name in ("task.safetensors", "task.json"):
        assert (result.task / name).samefile(result.task_last / name)
    assert {p.name for p in (result.out / "last").iterdir()} == {"state.json", "state.pt"}
    again = finetune(config(epochs=1, resume=True))
    assert again.to_dict() | {"images_per_second": 0} == result.to_dict() | {"images_per_second": 0}
    assert (again.metrics.confusion == result.metrics.confusion).all()
    with pytest.raises(UsageError, match=r"--epochs 2 \(was 1\)"):
        finetune(config(epochs=2, resume=True))
    before = tree(result.task)
    finetune(config(epochs=1, seed=1, overwrite=True, out=tmp_path / "other"))
    for file in result.task_last.iterdir():
        file.unlink()
    result.task_last.rmdir()
    with pytest.raises(DataError, match=r"task-last, of the last epoch, is gone"):
        finetune(config(epochs=1, resume=True))
    assert tree(result.task) == before


def test_other_packs_are_two_and_a_disk_without_links_has_two_copies(tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("same")
    two.write_text("other")

    def refused(*_):
        raise OSError("no hard links here")

    monkeypatch.setattr("vtk.training.runs.writer.os.link", refused)
    link_file(one, two)
    assert (
        two.read_text() == "same" and not one.samefile(two) and {p.name for p in tmp_path.iterdir()} == {"one", "two"}
    )


FLAGS = ["--model", "vit_tiny_patch16_224", "--model-kwargs", "depth=1,embed_dim=16,num_heads=2", "--no-pretrained",
         "--img-size", "32", "--batch-size", "12", "--workers", "0", "--device", "cpu"]  # fmt: skip


@pytest.mark.parametrize("command", ["finetune", pytest.param("train", marks=pytest.mark.slow)])
def test_a_dry_run_shows_images_and_an_estimate_and_writes_nothing(photos, tmp_path, capsys, command):
    out = tmp_path / "run"
    argv = [command, str(photos), *FLAGS, "--out", str(out), "--epochs", "4", "--dry-run"]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert [line.split() for line in said.splitlines() if "classes " in line] == [["3", "classes", "36", "15"]]
    assert "training images are cropped at random to" in said and not out.exists()
    assert "for 4 epochs, 12 steps in all (an estimate," in said
    assert main([*argv, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["images"] == {"train": 36, "val": 15, "classes": 3} and told["epochs"] == 4
    time = told["time"]
    assert time["estimate"] is True and (time["steps"], time["measured_steps"]) == (12, 3)
    both = 4 * (36 / time["images_per_second"] + 15 / time["eval_images_per_second"])
    assert time["seconds"] == pytest.approx(both) and not out.exists()


def test_a_dry_run_of_several_tasks_and_of_what_cannot_run_here(config, photos, tmp_path):
    report = dry_run(config(data=None, tasks=(f"a={photos}", f"b={photos}@48"), dry_run=True))
    assert report.images == {name: {"train": 36, "val": 15, "classes": 3} for name in ("a", "b")}
    assert report.estimate is not None and report.estimate.steps == 10
    other = dry_run(config(dry_run=True, precision="fp16"))
    assert other.estimate is None and other.to_dict()["time_unknown"] == "fp16 trains on CUDA only"
    assert not (tmp_path / "run").exists()


def test_a_dry_run_does_not_try_what_does_not_fit(config, monkeypatch):
    monkeypatch.setattr("vtk.training.memory.free_bytes", lambda device: 1000)
    report = dry_run(config(dry_run=True))
    assert report.estimate is None and report.why == "a step takes more memory than is free"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (44, "44 s"), (89, "89 s"), (95, "1.6 min"), (600, "10 min"), (5300, "88 min"), (9000, "2.5 h"),
     (200_000, "2.3 days")],
)  # fmt: skip
def test_durations(seconds, text):
    assert duration(seconds) == text
