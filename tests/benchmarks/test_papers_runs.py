"""The papers' runs: the images are always the same, and a run is trained once, by whichever experiment needs it."""

import contextlib
import json
import time
from dataclasses import replace

import numpy as np
import pytest
from papers import pictures
from papers.experiment import Job
from PIL import Image

import vtk.locks


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


def test_a_run_that_another_experiment_is_training_is_waited_for(tmp_path, monkeypatch):
    import vtk.training.train as module

    monkeypatch.setattr(module, "train", lambda config: pytest.fail("trained twice"))
    job = Job({"common": {}}, tmp_path / "images", {}, 0.5, 0, tmp_path, name="mine")
    waits = []
    with contextlib.ExitStack() as other:

        def wait(seconds):
            waits.append(seconds)
            (lock,) = tmp_path.glob(".*lock")
            digest = lock.name.split(".")[1]
            mark = {"numbers": {"top1": 0.4, "cpu_seconds": 3.0}, "weights": None, "job": "other", "process": 1}
            (tmp_path / f"{digest}.json").write_text(json.dumps(mark))
            other.close()

        monkeypatch.setattr("papers.experiment.time.sleep", wait)
        real = vtk.locks.hold_name
        monkeypatch.setattr(
            vtk.locks, "hold_name", lambda path, *a: other.enter_context(real(path, "x")) or real(path, *a)
        )
        assert job.train("run").numbers["top1"] == 0.4 and len(waits) == 1 and not job.resumed
        mine = replace(job, name="other")
        mine.train("run")
        assert list(mine.resumed.values()) == [3.0]  # what an attempt that was stopped had done counts for the job


def test_a_run_that_another_experiment_ended_a_moment_ago_is_not_trained_again(tmp_path, monkeypatch):
    import vtk.training.train as module

    monkeypatch.setattr(module, "train", lambda config: pytest.fail("trained twice"))

    @contextlib.contextmanager
    def hold(path, *others):
        """The other experiment left its mark and let go, after this one had looked for the mark."""
        mark = {"numbers": {"top1": 0.4, "cpu_seconds": 3.0}, "weights": None, "job": "other", "process": 1}
        path.with_name(f"{path.name}.json").write_text(json.dumps(mark))
        yield

    monkeypatch.setattr(vtk.locks, "hold_name", hold)
    job = Job({"common": {}}, tmp_path / "images", {}, 0.5, 0, tmp_path)
    assert job.train("run").numbers["top1"] == 0.4


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


def test_a_run_without_the_one_that_it_starts_from_is_no_run(tmp_path, monkeypatch):
    """Fine-tuning without weights would start from others, pretrained ones."""
    import vtk.training.finetune as module

    monkeypatch.setattr(module, "finetune", lambda config: pytest.fail("fine-tuned from nothing"))
    with pytest.raises(ValueError, match="the run before it diverged"):
        Job({"common": {}}, tmp_path / "images", {}, 0.0, 0, tmp_path).finetune("attn", weights=None)
