"""Two runs into one folder: the second is refused, and the files are all of the first."""

import contextlib
import csv
import io
import json
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from tests.vtk._faults import forkserver
from vtk.__main__ import main
from vtk.errors import DataError
from vtk.packs.cards import read_card
from vtk.training.engine.callbacks import Callback, EpochInfo
from vtk.training.finetune import finetune, finetune_tasks

EPOCHS = 4


def run_command(argv: list[str], ready: Path, other: Path, said: Path) -> None:
    """Run ``vtk finetune`` in a process of its own, at the same moment as the other one."""
    ready.touch()
    while not other.exists():
        time.sleep(0.001)
    with contextlib.redirect_stderr(io.StringIO()) as text, contextlib.redirect_stdout(io.StringIO()):
        code = main(argv)
    said.write_text(text.getvalue())
    sys.exit(code)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs forkserver")
def test_of_two_commands_started_together_one_is_refused(photos: Path, tmp_path: Path, vtk_home: Path) -> None:
    out = tmp_path / "run"
    argv = ["finetune", photos, "--out", out, "--model", "vit_tiny_patch16_224", "--no-pretrained", "--img-size", 32,
            "--model-kwargs", "depth=2", "embed_dim=32", "num_heads=2", "--epochs", EPOCHS, "--workers", 0,
            "--device", "cpu", "--batch-size", 8]  # fmt: skip
    ready = [tmp_path / f"ready-{seed}" for seed in (1, 2)]
    said = [tmp_path / f"said-{seed}" for seed in (1, 2)]
    processes = [
        forkserver().Process(
            target=run_command, args=([*map(str, argv), "--seed", str(i + 1)], ready[i], ready[1 - i], said[i])
        )
        for i in (0, 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    assert sorted(codes, key=str) == [0, 3], [file.read_text() for file in said]
    won = codes.index(0)
    (line,) = [line for line in said[1 - won].read_text().splitlines() if "error: " in line]
    assert line.startswith(f"vtk finetune: error: `--out` {out} is being written by `vtk finetune {photos}"[:110])
    assert f"process {processes[won].pid} on " in line
    seed = won + 1
    assert yaml.safe_load((out / "config.yaml").read_text())["seed"] == seed
    state = json.loads((out / "last" / "state.json").read_text())
    assert state["flags"]["seed"] == seed and state["epoch"] == EPOCHS
    for name in ("task", "task-last"):
        assert read_card(out / name).data["seed"] == seed
    rows = list(csv.DictReader((out / "metrics.csv").open()))
    assert [float(row["val_loss"]) for row in rows] == [row["val_loss"] for row in state["rows"]]
    assert read_card(out / "task").metrics["loss"] == state["best"]["loss"]
    assert not list(out.glob(".vtk-*"))


class Second(Callback):
    """Starts another run into the same folder in the middle of this one, in another thread."""

    def __init__(self, start: object) -> None:
        self.start, self.found = start, list[str]()

    def on_epoch(self, info: EpochInfo) -> None:
        if info.epoch == 1:
            thread = threading.Thread(target=self.run)
            thread.start()
            thread.join()

    def run(self) -> None:
        try:
            self.start()  # type: ignore[operator]
        except DataError as error:
            self.found.append(str(error))


@pytest.mark.parametrize("flags", [{}, {"overwrite": True}, {"resume": True, "epochs": 4}], ids=str)
def test_two_threads_of_python(config, tmp_path, flags) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    other = Second(lambda: finetune(config(out=tmp_path / "link", **flags)))
    finetune(config(), callbacks=[other])
    assert len(other.found) == 1 and "is being written by `vtk finetune" in other.found[0]
    assert "(this process)" in other.found[0]
    finetune(config(resume=True))  # afterwards it is free


def test_a_run_into_the_folder_of_a_task_of_several_is_refused(config, photos, tmp_path) -> None:
    both = {"tasks": (f"a={photos}", f"b={photos}"), "data": None, "out": tmp_path / "both"}
    other = Second(lambda: finetune(config(out=tmp_path / "both" / "a", resume=True)))
    finetune_tasks(config(**both), callbacks=[other])
    assert set(other.found) and all("both/a is being written by `vtk finetune --task" in line for line in other.found)
    single = Second(lambda: finetune_tasks(config(**both, overwrite=True)))
    finetune(config(out=tmp_path / "both" / "b", overwrite=True), callbacks=[single])
    assert len(single.found) == 1 and "both/b is being written" in single.found[0]


def test_what_an_earlier_part_drew_does_not_stay_beside_newer_epochs(config, tmp_path) -> None:
    finetune(config(epochs=3, stop_after=1))
    assert (tmp_path / "run" / "confusion.png").exists()

    class Look(Callback):
        def on_epoch(self, info: EpochInfo) -> None:
            plots = ("curves.png", "confusion.png", "per_class.csv")
            assert not any((tmp_path / "run" / name).exists() for name in plots)

    finetune(config(epochs=3, resume=True), callbacks=[Look()])
    assert (tmp_path / "run" / "confusion.png").exists()


def test_a_disk_that_fills_while_plots_are_drawn_leaves_none_of_them(config, tmp_path, monkeypatch) -> None:
    def full(rows: object, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vtk.evaluation.result_files.curves_png", full)
    with pytest.raises(DataError, match="No space left on device"):
        finetune(config(epochs=1))
    assert not any((tmp_path / "run" / name).exists() for name in ("curves.png", "confusion.png", "per_class.csv"))
