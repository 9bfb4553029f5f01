"""Callbacks: what they are told, against a bare loop and the files of the run, and what they can do to it."""

import copy
import csv
import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

import vtk
from tests.vtk.training.engine.test_fit import Fixed, attn_vit, bare_loop
from vtk.errors import UsageError
from vtk.packs.cards import read_card
from vtk.packs.load import load_task
from vtk.training.engine.callback_list import Callbacks
from vtk.training.engine.callbacks import Callback, Control, StepInfo
from vtk.training.engine.fitting import fit
from vtk.training.engine.precision import Fp32
from vtk.training.engine.processes import Ranks
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.objectives.base import Classification


class Log(Callback):
    """Remembers what it is told, and stops or fails where it is told to."""

    def __init__(self, stop=lambda kind, info: False, fail=lambda kind, info: False):
        self.stop, self.fail, self.told, self.events = stop, fail, {}, []

    def take(self, kind, info=None):
        self.told.setdefault(kind, []).append(info)
        self.events.append(kind)
        if info is not None and self.stop(kind, info):
            info.stop()
        if self.fail(kind, info):
            raise RuntimeError("mine")

    def on_epoch_start(self, info):
        self.take("start", info)

    def on_step(self, info):
        self.take("step", info)

    def on_steps_end(self):
        self.take("steps end")

    def on_epoch(self, info):
        self.take("epoch", info)

    def on_save(self, info):
        self.take("save", info)

    def on_end(self):
        self.take("end")


def table(path):
    with (path / "metrics.csv").open() as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


@pytest.fixture
def small(config):
    """Runs of one block: three steps of 12 images an epoch."""
    values = {"model_kwargs": ("depth=1", "embed_dim=16", "num_heads=2"), "batch_size": 12}
    return lambda **changes: config(**{**values, **changes})


def test_steps_have_the_losses_and_rates_of_a_bare_loop(tiny):
    model, stream, log = attn_vit(tiny), Fixed(4, 6, 3), Log()
    other = copy.deepcopy(model)
    config = FinetuneConfig(epochs=2, lr=1e-3, head_lr_mult=1.0, clip_grad=1.0, smoothing=0.1, accumulate=2)
    fit(
        model,
        Classification(3, smoothing=0.1),
        [stream],
        config,
        Fp32(),
        show_progress=False,
        callbacks=Callbacks([log]),
    )
    wanted = bare_loop(other, stream, epochs=2, lr=1e-3, mult=1.0, decay=config.weight_decay, smoothing=0.1, clip=1.0,
                       accumulate=2, warmup=config.warmup)  # fmt: skip
    steps = log.told["step"]
    assert [s.loss for s in steps] == pytest.approx(wanted, rel=1e-5)
    assert [(s.epoch, s.step, s.step_in_epoch, s.images) for s in steps] == [
        (1, 1, 1, 10), (1, 2, 2, 3), (2, 3, 1, 10), (2, 4, 2, 3)
    ]  # fmt: skip
    assert [s.epochs for s in log.told["start"]] == [2, 2] and [s.images for s in log.told["start"]] == [13, 13]
    assert log.events == ["start", "step", "step", "steps end"] * 2


def test_a_loss_that_is_not_known_is_read_only_when_asked_for():
    class Unread:
        def sum(self):
            raise AssertionError("it was read")

    info = StepInfo(1, Control(), 1, 1, 8, 1e-3, None, 1.0, Unread())
    with pytest.raises(AssertionError, match="it was read"):
        _ = info.loss
    assert dataclasses.replace(info, known_loss=0.5).loss == 0.5
    assert "Unread" not in repr(info)


def test_callbacks_change_nothing(small, tmp_path):
    plain = vtk.finetune(small(out=tmp_path / "a"))
    told = vtk.finetune(small(out=tmp_path / "b"), callbacks=[Log()])
    a, b = (load_file(result.task / "task.safetensors") for result in (plain, told))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert told.stopped_early is False


def test_a_run_tells_what_its_files_say(small):
    log = Log()
    result = vtk.finetune(small(epochs=3), callbacks=[log])
    rows = table(result.out)
    assert [dict(e.metrics) for e in log.told["epoch"]] == rows == result.rows
    assert [(e.epoch, e.loss, e.lr) for e in log.told["epoch"]] == [
        (i, r["loss"], r["lr"]) for i, r in enumerate(rows, 1)
    ]
    best = [e.epoch for e in log.told["epoch"] if e.best]
    assert best[-1] == result.best_epoch and "best so far" in log.told["epoch"][best[0] - 1].summary
    saved = [(s.what, s.path, s.epoch, s.best) for s in log.told["save"]]
    assert [s for s in saved if s[0] == "pack"] == [
        *(("pack", result.task, epoch, True) for epoch in best), ("pack", result.task_last, 3, False)
    ]  # fmt: skip
    assert [s[1:3] for s in saved if s[0] == "state"] == [(result.out / "last", i) for i in (1, 2, 3)]
    assert log.events[-1] == "end" and log.events.count("end") == 1
    mean = sum(s.loss * s.images for s in log.told["step"][-3:]) / sum(s.images for s in log.told["step"][-3:])
    assert mean == pytest.approx(rows[-1]["loss"], rel=1e-6)


def test_what_is_told_of_is_there(small):
    class Look(Callback):
        seen = 0

        def on_save(self, info):
            if info.what == "pack":
                assert load_task(info.path).card.metrics["epoch"] == info.epoch
                Look.seen += 1

    vtk.finetune(small(epochs=1), callbacks=[Look()])
    assert Look.seen == 2


def test_stop_after_an_epoch(small):
    result = vtk.finetune(small(epochs=4), callbacks=[Log(stop=lambda kind, info: kind == "epoch" and info.epoch == 2)])
    assert len(result.rows) == len(table(result.out)) == 2 and result.stopped_early
    assert read_card(result.task_last).metrics["epoch"] == 2
    load_task(result.task), load_task(result.task_last)


def test_stop_after_a_step_ends_the_epoch_there_and_a_resume_goes_on(small):
    log = Log(stop=lambda kind, info: kind == "step" and info.step == 5)
    result = vtk.finetune(small(epochs=3), callbacks=[log])
    assert len(log.told["step"]) == 5 and len(result.rows) == 2 and result.stopped_early
    two = log.told["step"][3:]
    assert result.rows[1]["loss"] == pytest.approx(sum(s.loss for s in two) / 2, rel=1e-6)
    row = result.rows[1]
    assert row["images_per_second"] * row["seconds"] == pytest.approx(24), "images that were not seen were counted"
    load_task(result.task), load_task(result.task_last)
    again = Log()
    result = vtk.finetune(small(epochs=3, resume=True), callbacks=[again])
    assert [e.epoch for e in again.told["epoch"]] == [3] and len(table(result.out)) == 3


def test_an_error_of_a_callback_ends_the_run_and_keeps_what_was_saved(small):
    log = Log(fail=lambda kind, info: kind == "epoch" and info.epoch == 2)
    with pytest.raises(RuntimeError, match="mine"):
        vtk.finetune(small(epochs=4), callbacks=[log])
    assert log.events[-1] == "end"
    out = small().out
    assert len(table(out)) == 2
    load_task(out / "task")
    again = Log()
    result = vtk.finetune(small(epochs=4, resume=True), callbacks=[again])
    assert [row["epoch"] for row in result.rows] == [1, 2, 3, 4]
    assert [e.epoch for e in again.told["epoch"]] == [3, 4], "the state of the second epoch was lost"


def test_an_error_in_a_step_closes_everything(small):
    first = Log()
    with pytest.raises(RuntimeError, match="mine"):
        vtk.finetune(small(), callbacks=[first, Log(fail=lambda kind, info: kind == "step")])
    assert first.events == ["start", "step", "steps end", "end"]


def test_every_callback_hears_the_end_even_if_one_fails(small):
    logs = [Log(fail=lambda kind, info: kind == "end"), Log(), Log(fail=lambda kind, info: kind == "end")]
    with pytest.raises(RuntimeError, match="mine"):
        vtk.finetune(small(epochs=1), callbacks=logs)
    assert [log.events[-1] for log in logs] == ["end"] * 3


def test_of_several_tasks_each_has_its_epochs(small, photos):
    log = Log(stop=lambda kind, info: kind == "epoch" and info.task == "b")
    result = vtk.finetune_tasks(small(data=None, tasks=(f"a={photos}", f"b={photos}"), epochs=3), callbacks=[log])
    assert [(e.task, e.epoch) for e in log.told["epoch"]] == [("a", 1), ("b", 1)]
    for info in log.told["epoch"]:
        assert dict(info.metrics) == table(result.out / info.task)[0]
    assert {(s.what, s.task) for s in log.told["save"]} == {("pack", "a"), ("pack", "b"), ("state", "")}
    assert all(run.stopped_early for run in result.tasks.values()) and log.events.count("end") == 1


def test_train_and_pretrain_tell_theirs(photos, tmp_path):
    from vtk.training.pretrain.config import PretrainConfig
    from vtk.training.train_config import TrainConfig

    common = {
        "data": photos, "img_size": 16, "epochs": 1, "workers": 0, "device": "cpu", "batch_size": 18,
        "model": "vit_tiny_patch16_224", "model_kwargs": ("patch_size=4", "depth=1", "embed_dim=16", "num_heads=2"),
    }  # fmt: skip
    log = Log()
    trained = vtk.train(TrainConfig(out=tmp_path / "t", **common), callbacks=[log])
    assert {(s.what, s.path) for s in log.told["save"]} == {
        ("checkpoint", trained.model), ("checkpoint", trained.model_last), ("state", tmp_path / "t" / "last")
    }  # fmt: skip
    log = Log()
    made = vtk.pretrain(PretrainConfig(out=tmp_path / "p", method="mae", **common), callbacks=[log])
    assert [(s.what, s.path) for s in log.told["save"]] == [
        ("backbone", made.backbone), ("state", tmp_path / "p" / "last")
    ]  # fmt: skip
    assert [dict(e.metrics) for e in log.told["epoch"]] == table(tmp_path / "p") and log.events[-1] == "end"
    assert json.loads((tmp_path / "p" / "metrics.jsonl").read_text())["epoch"] == 1


@pytest.mark.parametrize("given", [[Log], [print], Log(), ["x"]])
def test_what_is_no_list_of_callbacks_is_refused(small, given):
    with pytest.raises(UsageError, match="`callbacks`"):
        vtk.finetune(small(), callbacks=given)
    assert not small().out.exists()


class Second(Ranks):
    """The main process of two, whose other one never asks to stop."""

    def __init__(self):
        super().__init__(torch.device("cpu"), 0, 2)
        self.sums = 0

    def sum(self, value):
        self.sums += 1
        return value


def test_of_several_processes_all_stop_at_the_same_look(tiny):
    log = Log(stop=lambda kind, info: kind == "step" and info.step == 3)
    ranks, stream = Second(), Fixed(*[2] * 25)
    config = FinetuneConfig(epochs=2, lr=1e-4)
    result = fit(attn_vit(tiny), Classification(3), [stream], config, Fp32(), ranks=ranks, show_progress=False,
                 callbacks=Callbacks([log]))  # fmt: skip
    assert len(log.told["step"]) == 10 and len(result.rows) == 1 and result.stopped
    assert [s.known_loss is not None for s in log.told["step"]] == [False] * 9 + [True]
