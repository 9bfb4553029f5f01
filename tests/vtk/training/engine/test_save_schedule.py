"""Runs that are stopped within an epoch go on there, to the last bit, with every kind of state that a run can have."""

import json
import os
import random
import signal
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.vtk._faults import forkserver, tree
from tests.vtk.training.test_resume import LEVIT
from vtk.errors import DataError, StoppedError, UsageError
from vtk.training.engine.callbacks import Callback
from vtk.training.engine.loss_scale import DynamicScaler
from vtk.training.engine.precision import Fp16
from vtk.training.finetune import finetune, finetune_tasks
from vtk.training.options.running import Interval, parse_interval
from vtk.training.runs import resume_state as checkpoint
from vtk.training.train import train
from vtk.training.train_config import TrainConfig

TIMES = ("seconds", "images_per_second")
KINDS = {
    "mixed images, dropped paths": {
        "mixup": 0.8,
        "cutmix": 1.0,
        "mix_prob": 0.7,
        "drop_path": 0.3,
        "reprob": 0.3,
        "ema": 0.9,
    },
    "loading processes": {"mixup": 0.8, "workers": 2, "auto_augment": "rand-m5-mstd0.5"},
    "averaged weights, accumulated": {"ema": 0.9, "accumulate": 2, "batch_size": 4, "drop_path": 0.2},
    "statistics of BatchNorm": {**LEVIT, "ema": 0.9, "train": "full"},
    "two passes": {"sam": 0.05, "adversarial": 2.0, "drop_path": 0.3, "mixup": 0.5},
    "each class equally often": {"sampler": "balanced", "precision": "bf16", "optimizer": "sgd", "lr": 0.05},
    "factors of LoRA": {"train": "lora", "lora_dropout": 0.2},
    "weighted classes, int8 packs": {"class_weights": "balanced", "smoothing": 0.0, "pack_dtype": "int8"},
    "layers and few steps": {"layer_decay": 0.7, "max_steps": 7, "limit": 20, "batch_size": 4},
}  # fmt: skip


@pytest.fixture
def config(config):
    """Runs of one block."""
    return lambda **changes: config(**{"model_kwargs": ("depth=1", "embed_dim=16", "num_heads=2"), **changes})


class Death(Exception):
    """What a run dies of."""


class Dies(Callback):
    """Dies in step ``step`` of epoch ``epoch``, both from 1: what that step did is lost."""

    def __init__(self, epoch, step):
        self.at = epoch, step

    def on_step(self, info):
        if (info.epoch, info.step_in_epoch) == self.at:
            raise Death


def numbers(rows):
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def same(whole, parts):
    """Tell that packs and adapter are equal to the byte, and all rows equal but for times."""
    files = [path.relative_to(whole) for path in sorted(whole.rglob("*.safetensors")) if path.parent.name != "last"]
    files += [path.relative_to(whole) for path in sorted(whole.rglob("task.json"))]
    assert len(files) >= 2
    for name in files:
        if name.name not in ("task.safetensors", "task.json"):  # the two texts in their headers are in any order
            torch.testing.assert_close(load_file(whole / name), load_file(parts / name), rtol=0, atol=0)
        else:
            assert (whole / name).read_bytes() == (parts / name).read_bytes(), name
    for file in sorted(whole.rglob("metrics.jsonl")):
        mine, theirs = (
            numbers(map(json.loads, (out / file.relative_to(whole)).read_text().splitlines())) for out in (whole, parts)
        )
        assert mine == theirs


def stopped(run, config, at, **more):
    """Run until step ``at``, which is the last that is lost."""
    with pytest.raises(Death):
        run(config(**more), callbacks=[Dies(*at)])


@pytest.mark.parametrize(
    "changes",
    [pytest.param(v, id=k, marks=pytest.mark.slow if i > 0 else ()) for i, (k, v) in enumerate(KINDS.items())],
)
def test_a_run_that_dies_within_an_epoch_goes_on_there(config, tmp_path, changes):
    changes = {"epochs": 2, "batch_size": 8, **changes}
    whole = finetune(config(out=tmp_path / "whole", **changes))
    parts = {**changes, "out": tmp_path / "parts", "save_every": "2steps"}
    stopped(finetune, config, (1, 4), **parts)
    state = checkpoint.load_state(tmp_path / "parts" / "last")
    assert (state.fit.epoch, state.fit.step, state.best) == (0, 2, {})
    stopped(finetune, config, (2, 2), **parts, resume=True)
    steps = []

    class Steps(Callback):
        def on_step(self, info):
            steps.append((info.epoch, info.step_in_epoch, info.step))

    found = finetune(config(**parts, resume=True), callbacks=[Steps()])
    assert steps[0][0] == 2 if steps[0][1] > 1 else True
    same(tmp_path / "whole", tmp_path / "parts")
    assert numbers(found.rows) == numbers(whole.rows)


@pytest.mark.parametrize("sampling", [1.0, pytest.param(3.0, marks=pytest.mark.slow)])
def test_several_tasks_go_on_within_an_epoch(config, photos, tmp_path, sampling):
    """A step holds images of the tasks that the seed draws for it; each has an optimiser of its own."""
    (few := tmp_path / "few").mkdir()
    for part, count in (("train", 4), ("val", 2)):
        for name in ("blue", "red"):
            (few / part / name).mkdir(parents=True)
            for i in range(count):
                (few / part / name / f"{i}.png").symlink_to(photos / part / name / f"{i}.png")
    changes = {
        "data": None, "tasks": (f"a={photos}", f"b={few}@48"), "epochs": 2, "batch_size": 4, "sampling": sampling,
        "mixup": 0.5, "drop_path": 0.2, "ema": 0.9,
    }  # fmt: skip
    whole = finetune_tasks(config(out=tmp_path / "whole", **changes))
    parts = {**changes, "out": tmp_path / "parts", "save_every": "3"}
    stopped(finetune_tasks, config, (1, 5), **parts)
    assert checkpoint.load_state(tmp_path / "parts" / "last").fit.step == 3
    stopped(finetune_tasks, config, (2, 6), **parts, resume=True)
    found = finetune_tasks(config(**parts, resume=True))
    same(tmp_path / "whole", tmp_path / "parts")
    for name in ("a", "b"):
        assert numbers(found.tasks[name].rows) == numbers(whole.tasks[name].rows)


@pytest.mark.slow
def test_training_from_scratch_goes_on_within_an_epoch(photos, tmp_path):
    def config(**changes):
        values = {
            "data": photos, "model": "vit_tiny_patch16_224", "model_kwargs": ("depth=1", "embed_dim=16", "num_heads=2"),
            "img_size": 32, "epochs": 2, "batch_size": 8, "workers": 0, "device": "cpu", "drop": 0.2, "mixup": 0.5,
            "aug_repeats": 2, "loss": "bce", "crop_pad": 2,
        }  # fmt: skip
        return TrainConfig(**{**values, **changes})

    train(config(out=tmp_path / "whole"))
    parts = {"out": tmp_path / "parts", "save_every": "1"}
    stopped(train, config, (1, 4), **parts)
    stopped(train, config, (2, 3), **parts, resume=True)
    train(config(**parts, resume=True))
    same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_a_loss_scaler_goes_on_within_an_epoch(config, tmp_path, monkeypatch):
    monkeypatch.setattr("vtk.training.runs.plan.make_precision", lambda *a, **k: Fp16(DynamicScaler("cpu", 2.0**20, 3)))
    changes = {"precision": "fp16", "batch_size": 4}
    whole = finetune(config(out=tmp_path / "whole", **changes))
    parts = {**changes, "out": tmp_path / "parts", "save_every": "1"}
    stopped(finetune, config, (1, 6), **parts)
    found = finetune(config(**parts, resume=True))
    same(tmp_path / "whole", tmp_path / "parts")
    assert numbers(found.rows) == numbers(whole.rows) and found.rows[0]["skipped_steps"] > 0


def test_a_run_saves_by_the_clock_of_its_main_process(config, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("vtk.training.engine.save_schedule.time.monotonic", lambda: now[0])
    steps = []

    class Clock(Callback):
        def on_step(self, info):
            now[0] += 25  # seconds, told after the clock of this step was read

        def on_save(self, info):
            if info.what == "state":
                state = checkpoint.load_state(info.path).fit
                steps.append((state.epoch, state.step))

    finetune(config(epochs=2, batch_size=4, save_every="1min"), callbacks=[Clock()])
    # nine steps an epoch; the time counts from the latest save
    assert steps == [(0, 4), (0, 8), (1, 0), (1, 4), (1, 8), (2, 0)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("500", Interval(steps=500)), (500, Interval(steps=500)), ("1step", Interval(steps=1)),
        ("20 steps", Interval(steps=20)), ("90s", Interval(seconds=90)), ("10min", Interval(seconds=600)),
        ("1.5h", Interval(seconds=5400)), ("0.5 min", Interval(seconds=30)),
    ],
)  # fmt: skip
def test_how_often_is_a_number_of_steps_or_a_time(config, text, wanted):
    assert parse_interval(config(save_every=text).save_every) == wanted


@pytest.mark.parametrize("text", ["0", "0min", "-3", "10m", "ten", "", "5 epochs", "1e3", "0.0h", 2.5])
def test_how_often_is_nothing_else(config, text):
    with pytest.raises(UsageError, match=r"`--save-every` is .*; allowed is optimizer steps, such as 500, or a time"):
        config(save_every=text)


def test_a_damaged_state_within_an_epoch_is_one_line(config, tmp_path):
    run = {"out": tmp_path / "run", "save_every": "1"}
    stopped(finetune, config, (1, 3), **run)
    file = tmp_path / "run" / "last" / "state.pt"
    whole = torch.load(file, weights_only=True)
    for damage in ({"parts": []}, {"parts": [{}]}, {"parts": [{**whole["parts"][0], "buffers": [torch.ones(3)]}]}):
        torch.save({**whole, **damage}, file)
        with pytest.raises(
            DataError, match=r"the state within epoch 1 is damaged.*--overwrite in place of --resume"
        ) as caught:
            finetune(config(**run, resume=True))
        assert "\n" not in str(caught.value)
    torch.save(whole, file)
    info = json.loads((file.parent / "state.json").read_text())
    assert info["schema"] == 2 and info["step"] == 2
    (file.parent / "state.json").write_text(json.dumps({**info, "step": 99}))
    with pytest.raises(DataError, match="the state within epoch 1 is damaged"):
        finetune(config(**run, resume=True))


def test_without_it_a_state_is_what_older_versions_read(config, tmp_path):
    finetune(config(stop_after=1))
    last = tmp_path / "run" / "last"
    assert json.loads((last / "state.json").read_text())["schema"] == 1
    state = torch.load(last / "state.pt", weights_only=True)
    assert state.keys() == {"optimizer", "schedule", "scaler", "ema", "confusion"}


def test_how_often_a_run_is_saved_changes_neither_pack_nor_command(config, tmp_path):
    runs = [finetune(config(out=tmp_path / str(i), save_every=every, epochs=1)) for i, every in enumerate((None, "1"))]
    assert tree(runs[0].task) == tree(runs[1].task) and tree(runs[0].task_last) == tree(runs[1].task_last)


@pytest.fixture
def caught_signals():
    """What a terminal and Python do with these two, and what they did before the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Sends(Callback):
    """Sends signals to its own process in a step, or before the evaluation that follows it."""

    def __init__(self, epoch, step, *numbers, late=False):
        self.at, self.numbers, self.late, self.armed = (epoch, step), numbers, late, False

    def on_step(self, info):
        if (info.epoch, info.step_in_epoch) == self.at:
            self.armed = True
            if not self.late:
                self.send()

    def on_steps_end(self):
        if self.armed and self.late:
            self.send()

    def send(self):
        for number in self.numbers:
            os.kill(os.getpid(), number)


@pytest.mark.usefixtures("caught_signals")
@pytest.mark.parametrize(
    ("number", "code", "told"),
    [(signal.SIGTERM, 143, "SIGTERM"), pytest.param(signal.SIGINT, 130, "Ctrl-C", marks=pytest.mark.slow)],
    ids=["TERM", "INT"],
)
def test_a_signal_saves_and_says_how_to_go_on(config, tmp_path, number, code, told):
    changes = {"mixup": 0.5, "drop_path": 0.2, "workers": 1 if code == 143 else 0}
    whole = finetune(config(out=tmp_path / "whole", **changes))
    parts = {**changes, "out": tmp_path / "parts"}
    with pytest.raises(StoppedError) as caught:
        finetune(config(**parts), callbacks=[Sends(1, 3, number)])
    last = tmp_path / "parts" / "last"
    assert str(caught.value) == (
        f"stopped by {told} after step 3 of epoch 1, saved in {last}; "
        "the same command with --resume continues from there"
    )  # the step that was under way is finished
    assert caught.value.exit_code == code
    assert checkpoint.load_state(last).fit.step == 3 and not (tmp_path / "parts" / "task").exists()
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == [
        signal.default_int_handler,
        signal.SIG_DFL,
    ]
    found = finetune(config(**parts, resume=True))
    same(tmp_path / "whole", tmp_path / "parts")
    assert numbers(found.rows) == numbers(whole.rows)


@pytest.mark.usefixtures("caught_signals")
@pytest.mark.parametrize(
    "several", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one task", "several tasks"]
)
def test_a_signal_ends_an_evaluation_after_the_steps_of_the_epoch_were_saved(config, photos, tmp_path, several):
    """Its numbers are measured anew. The model holds averages while it is evaluated, and others are what is saved."""
    run = finetune_tasks if several else finetune
    changes = {"ema": 0.5, **({"data": None, "tasks": (f"a={photos}", f"b={photos}")} if several else {})}
    run(config(out=tmp_path / "whole", **changes))
    parts = {**changes, "out": tmp_path / "parts"}
    with pytest.raises(StoppedError, match="after step 5 of epoch 2, saved in"):
        run(config(**parts), callbacks=[Sends(2, 5, signal.SIGTERM, late=True)])
    state = checkpoint.load_state(tmp_path / "parts" / "last")
    assert (state.fit.epoch, state.fit.step, len(state.fit.rows)) == (1, 5, 1)
    run(config(**parts, resume=True))
    same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.usefixtures("caught_signals")
def test_the_second_signal_ends_a_run_at_once(config, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        finetune(config(), callbacks=[Sends(1, 2, signal.SIGINT, signal.SIGINT)])
    assert not (tmp_path / "run" / "last").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("caught_signals")
def test_handlers_of_others_and_of_other_threads_are_left_alone(config, tmp_path):
    heard, seen = [], []
    signal.signal(signal.SIGTERM, own := lambda number, frame: heard.append(number))

    class Looks(Callback):
        def on_step(self, info):
            seen.append(signal.getsignal(signal.SIGTERM) is own)

    assert len(finetune(config(), callbacks=[Sends(1, 2, signal.SIGTERM), Looks()]).rows) == 2
    assert heard == [signal.SIGTERM] and all(seen)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    found = []

    class Asks(Callback):
        def on_step(self, info):
            found.append([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)])

    thread = threading.Thread(target=lambda: finetune(config(out=tmp_path / "thread"), callbacks=[Asks()]))
    thread.start()
    thread.join()
    assert len(found) == 10 and all(one == [signal.default_int_handler, signal.SIG_DFL] for one in found)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs signals of Linux")
def test_killed_at_any_moment_a_run_goes_on_to_the_same_bytes(config, photos, tmp_path):
    """Real processes and a real SIGKILL at 20 random moments: every one of the 20 ends as the run nobody touched."""
    changes = {"epochs": 3, "batch_size": 4, "mixup": 0.5, "drop_path": 0.2, "ema": 0.9}
    begun = time.monotonic()
    whole = finetune(config(out=tmp_path / "whole", **changes))
    length = time.monotonic() - begun
    context, chance, within = forkserver(), random.Random(0), 0
    for i in range(20):
        run = {**changes, "out": tmp_path / str(i), "save_every": chance.choice(["1", "3", "0.05s"])}
        process = context.Process(target=finetune, args=(config(**run),))
        process.start()
        first = tmp_path / str(i) / "last" / "state.json"
        while not first.exists() and process.is_alive():
            time.sleep(0.002)
        time.sleep(chance.uniform(0, length))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        within += checkpoint.load_state(first.parent).fit.step > 0
        found = finetune(config(**run, resume=True))
        same(tmp_path / "whole", tmp_path / str(i))
        assert numbers(found.rows) == numbers(whole.rows)
        assert not list((tmp_path / str(i)).rglob("*.tmp-*"))
    print(f"20 of 20 went on, {within} of them within an epoch")
    assert within >= 5
