"""Runs that are killed, or whose disk fails: what is lost, what is kept, and what they are told."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vtk._faults import files_below, forkserver, tree
from vtk.errors import DataError
from vtk.packs import load_task
from vtk.training.finetune import finetune, finetune_tasks
from vtk.training.runs import resume_state as checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs signals and limits of Linux")

EPOCHS = 30


def train(config):
    return (finetune_tasks if config.tasks else finetune)(config)


def packs(out: Path, folder: str) -> dict[str, dict[str, bytes]]:
    """Return the files of the packs of that name in a run of one task or of several."""
    return {str(p.relative_to(out)): tree(p) for p in sorted(out.rglob(folder)) if p.is_dir()}


def epochs_done(out: Path) -> int:
    try:
        return checkpoint.load_state(out / "last").fit.epoch
    except DataError as error:
        assert "no epoch was finished" in str(error)  # and not that it is damaged
        return 0


def rows(out: Path) -> int:
    files = list(out.rglob("metrics.jsonl"))
    return max((len(file.read_text().splitlines()) for file in files), default=0)


def wait_for_work(process, config_file: Path) -> bool:
    """Wait until the run has begun (it writes its flags first); False if it ended before."""
    before = config_file.stat().st_mtime_ns if config_file.exists() else 0
    while process.is_alive():
        if config_file.exists() and config_file.stat().st_mtime_ns != before:
            return True
        time.sleep(0.002)
    return False


@pytest.fixture
def one(config, tmp_path):
    return config(epochs=EPOCHS, out=tmp_path / "run", drop_path=0.1, mixup=0.5, lr=5e-4)


@pytest.fixture
def two(config, photos, tmp_path):
    tasks = (f"a={photos}", f"b={photos}@48")
    return config(data=None, tasks=tasks, epochs=EPOCHS, out=tmp_path / "run", lr=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kills"), [("one", 20), ("two", 10)], ids=["one task", "several tasks"])
def test_kills_cost_no_pack_and_at_most_the_epoch_they_fell_into(kind, kills, request, tmp_path, monkeypatch):
    """Real processes, a real SIGKILL at random moments, and in the end the bytes of a run that nobody touched."""
    wanted = request.getfixturevalue(kind)
    best: list[dict[str, dict[str, bytes]]] = [{}]  # after each epoch of a run that nobody touches
    save = checkpoint.save_state

    def note(path, saved):
        best.append(packs(path.parent, "task"))
        save(path, saved)

    begun = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_state", note)
        whole = dataclasses.replace(wanted, out=tmp_path / "whole")
        train(whole)
    epoch = (time.monotonic() - begun) / EPOCHS
    context = forkserver()
    chance, done, saving = random.Random(0), 0, 0
    out = wanted.out
    for _ in range(kills):
        flags = {"resume": True} if done else {"overwrite": True}
        process = context.Process(target=finetune_tasks if wanted.tasks else finetune,
                                  args=(dataclasses.replace(wanted, **flags),))  # fmt: skip
        process.start()
        assert wait_for_work(process, out / "config.yaml"), "the run ended by itself; give the test more epochs"
        time.sleep(chance.uniform(0, 2 * epoch))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, "the run ended by itself; give the test more epochs"
        saving += any(out.rglob("*.tmp-*"))
        now = epochs_done(out)
        assert now >= max(done, rows(out) - 1), "more than the epoch in progress was lost"
        done, found = now, packs(out, "task")
        if wanted.tasks:  # a kill can fall between the packs of two tasks
            for name in best[min(now + 1, EPOCHS)]:
                assert found.get(name) in [best[now].get(name), best[now + 1].get(name)], name
        else:
            assert found in (best[now], best[now + 1]), f"a pack of epoch {now} or {now + 1} was damaged"
        for pack in found:
            load_task(out / pack)
    print(f"{kills} of {kills} survived, {saving} of them in the middle of a save; {done} epochs done")
    train(dataclasses.replace(wanted, resume=True))
    assert packs(out, "task") == packs(tmp_path / "whole", "task") == best[-1]
    assert packs(out, "task-last") == packs(tmp_path / "whole", "task-last")
    assert not list(out.rglob("*.tmp-*")), "what a kill left half written was not cleared away"


@pytest.fixture
def begun(config, tmp_path):
    """A run of three epochs that has done one, and the function that goes on with it."""
    flags = {"epochs": 3, "out": tmp_path / "run"}
    finetune(config(stop_after=1, **flags))
    return lambda **changes: finetune(config(resume=True, **flags, **changes))


def test_a_full_disk_ends_a_run_with_one_line_and_costs_nothing(begun, config, tmp_path):
    before = tree(tmp_path / "run")
    with files_below(20_000), pytest.raises(DataError) as caught:  # flags and numbers fit, weights do not
        begun()
    assert str(caught.value).startswith("cannot write ") and "\n" not in str(caught.value)
    after = tree(tmp_path / "run")
    assert {k: v for k, v in after.items() if "/" in k} == {k: v for k, v in before.items() if "/" in k}
    begun()
    whole = finetune(config(epochs=3, out=tmp_path / "whole"))
    for folder in ("task", "task-last"):
        assert tree(tmp_path / "run" / folder) == tree(whole.out / folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", mount], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("cannot mount a small file system here")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", mount], check=True)  # an exception may still hold a file of it


def test_a_small_disk_keeps_the_whole_files_it_has(config, small_disk):
    out = small_disk / "run"
    with pytest.raises(DataError, match=r"cannot write .*: (No space left|the disk is full).*; free some space or"):
        finetune(config(epochs=3, out=out))
    found = tree(out)
    assert not [name for name in found if ".tmp-" in name]
    if (out / "task").exists():
        load_task(out / "task")


def test_a_read_only_disk_is_refused_before_the_images_are_read(config, small_disk, monkeypatch):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    monkeypatch.setattr("vtk.training.runs.label_kinds.scan", lambda *_, **__: pytest.fail("images were read"))
    with pytest.raises(DataError, match=r"cannot (write|make the folder) .*[Rr]ead-only") as caught:
        finetune(config(out=small_disk / "run"))
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"cannot write .*read-only"):
        finetune(config(out=small_disk, overwrite=True))


def test_a_damaged_state_is_one_line_and_changes_nothing(begun, tmp_path):
    whole = tree(tmp_path / "run")
    for name in ("last/model.safetensors", "last/state.pt", "last/state.json"):
        file, data = tmp_path / "run" / name, whole[name]
        for damage, contents in {
            "gone": None,
            "cut": data[: len(data) // 2],
            "empty": b"",
            "zeros": bytes(len(data)),
        }.items():
            if contents is None:
                file.unlink()
            else:
                file.write_bytes(contents)
            before = tree(tmp_path / "run")
            with pytest.raises(DataError) as caught:
                begun()
            told = str(caught.value)
            assert "--overwrite in place of --resume" in told and "\n" not in told and "weights_only" not in told, (
                damage
            )
            assert tree(tmp_path / "run") == before
        file.write_bytes(data)
    assert len(begun().rows) == 3  # and whole again it goes on


def test_the_best_numbers_of_an_edited_state_are_looked_at(begun, tmp_path):
    state = tmp_path / "run" / "last" / "state.json"
    info = json.loads(state.read_text())
    del info["best"]["top1"]
    state.write_text(json.dumps(info))
    with pytest.raises(DataError, match=r"is damaged \(it lacks 'top1'\); .*give --overwrite in place of --resume"):
        begun()


def test_a_run_without_an_epoch_says_how_to_start_it(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("epochs: 2\n")
    with pytest.raises(DataError, match=r"no epoch was finished; give --overwrite in place of --resume to start one"):
        finetune(config(resume=True, out=tmp_path / "run"))
    with pytest.raises(DataError, match=r"no epoch was finished; leave out --resume to start one"):
        finetune(config(resume=True, out=tmp_path / "nowhere"))


def test_the_state_of_a_run_holds_no_code(begun, tmp_path):
    """What `--resume` reads could have been put there by anyone."""

    class Shell:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    import torch

    torch.save({"optimizer": Shell(), "schedule": {}, "confusion": None}, tmp_path / "run" / "last" / "state.pt")
    with pytest.raises(DataError, match=r"state.pt is damaged or holds more than tensors"):
        begun()
    assert not (tmp_path / "pwned").exists()
    info = json.loads((tmp_path / "run" / "last" / "state.json").read_text())
    (tmp_path / "run" / "last" / "state.json").write_text(json.dumps(info)[:-1] + ', "epoch": 1}')
    with pytest.raises(DataError, match=r"key 'epoch' is there twice.*--overwrite in place"):
        begun()
