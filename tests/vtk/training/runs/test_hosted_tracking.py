"""``--track wandb`` and ``--track mlflow``: read back by their own readers, and what a failure of theirs does."""

import csv
import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from vtk.errors import UnavailableError, UsageError
from vtk.options import Config
from vtk.training.engine.callbacks import Control, EpochInfo
from vtk.training.finetune import finetune, finetune_tasks
from vtk.training.options.outcome import TrackOptions
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.runs import hosted_tracking as hosted
from vtk.training.runs.tracking import open_trackers


class Recorder(hosted.HostedTracker):
    """A tracker whose server is a list, with a fault at a step of its work."""

    name, fault, before, seen, ends = "json", "", (), [], []

    def open(self, known):
        if self.fault == "open":
            raise SystemExit("no key\nsecond line")
        return {"id": known.get("id", "first")}, self.before, "there"

    def log(self, scalars, epoch):
        if self.fault == "log":
            raise ConnectionError("refused")
        if self.fault == "hang":
            threading.Event().wait()
        self.seen.append((epoch, dict(scalars)))

    def finish(self):
        self.ends.append(self.fault)
        if self.fault == "finish":
            raise OSError("gone")


@pytest.fixture
def recorder(monkeypatch):
    """The class `Recorder`, and runs of one block and one step an epoch that are tracked by it."""
    monkeypatch.setattr(hosted, "_start_accelerate", lambda: None)
    monkeypatch.setattr("vtk.training.runs.tracking._HOSTED", {"wandb": Recorder})
    monkeypatch.setattr("vtk.training.runs.hosted_tracking.HostedTracker.packages", ("json",))
    for name, value in {"fault": "", "before": (), "seen": [], "ends": []}.items():
        monkeypatch.setattr(Recorder, name, value)
    return Recorder


@pytest.fixture
def config(config):
    small = {"model_kwargs": ("depth=1", "embed_dim=16", "num_heads=2"), "batch_size": 36}
    return lambda **changes: config(**{**small, **changes})


def epochs_of(out: Path) -> list[dict[str, str]]:
    with (out / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_tracker_gets_each_epoch_once_also_after_a_resume(config, recorder):
    out = finetune(config(epochs=3, stop_after=1, track=("wandb",))).out
    assert [epoch for epoch, _ in recorder.seen] == [1] and hosted.read_record(out) == {"json": {"id": "first"}}
    recorder.before = (1, 2)  # the run was killed after it had told of epoch 2, and before it had saved it
    result = finetune(config(epochs=3, resume=True, track=("wandb",)))
    assert [epoch for epoch, _ in recorder.seen] == [1, 3]
    row = dict(result.rows[-1])
    epoch = row.pop("epoch")
    assert recorder.seen[-1] == (epoch, {hosted.tag(key): value for key, value in row.items()})


WHY = {"open": "no key;", "log": "refused;", "finish": "gone;", "hang": "its server takes more than 0 s;"}


def row_of(epoch: int) -> EpochInfo:
    return EpochInfo(epoch, Control(), 0.0, 0.0, {"epoch": epoch, "loss": 0.5}, False, "", "")


@pytest.mark.parametrize("fault", list(WHY))
def test_a_failure_is_one_line_and_ends_after_a_while(tmp_path, recorder, monkeypatch, capsys, fault):
    monkeypatch.setattr(hosted, "_PATIENCE", 0.05 if fault == "hang" else 30)
    recorder.fault = fault
    tracker = Recorder(tmp_path, tmp_path, {}, [{"epoch": 1, "loss": 0.5}])
    tracker.on_epoch(row_of(2))
    tracker.on_end()
    said = " ".join(capsys.readouterr().err.split())
    assert said.count(f"--track json: {WHY[fault]}") == 1 and "second line" not in said
    assert recorder.ends == {"log": ["log"], "finish": ["finish"]}.get(fault, [])


def test_no_failure_of_a_tracker_ends_a_run(config, recorder, capsys):
    recorder.fault = "log"
    result = finetune(config(epochs=2, track=("wandb",)))
    assert [row["epoch"] for row in epochs_of(result.out)] == ["1", "2"] and (result.task / "task.json").is_file()
    assert "metrics.csv has" in capsys.readouterr().err
    recorder.fault = ""
    finetune(config(epochs=2, resume=True, track=("wandb",)))  # nothing is left to train
    assert [epoch for epoch, _ in recorder.seen] == [1, 2]


def test_a_package_that_cannot_be_imported_is_warned_of(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Recorder, "packages", ("no_such_package_of_ours",))
    tracker = Recorder(tmp_path, tmp_path, {})
    tracker.on_epoch(row_of(1))
    tracker.on_end()
    assert "No module named" in capsys.readouterr().err


def test_without_the_package_one_line_and_no_data_is_read(config, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("vtk.training.runs.task.read_data", lambda *a, **k: pytest.fail("data was read"))
    for name in ("wandb", "mlflow"):
        with pytest.raises(UnavailableError, match=rf"`--track` {name} .*pip install 'vit-toolkit\[{name}\]'"):
            finetune(config(track=("tensorboard", name) if name == "none" else (name,)))
    with pytest.raises(UsageError, match="`--track` is comet; allowed is tensorboard, wandb, mlflow or csv"):
        PretrainConfig(track=("comet",))
    assert issubclass(PretrainConfig, TrackOptions) and issubclass(TrackOptions, Config)


@pytest.mark.parametrize("text", ["[]", "{", '{"vtk_trackers": 3}', '{"vtk_trackers": {"json": 3}}'])
def test_a_damaged_record_is_no_record(tmp_path, text):
    (tmp_path / hosted.RECORD).write_text(text)
    assert hosted.read_record(tmp_path) == {}


def test_only_the_local_files_of_the_runs_own_trackers_are_cleared(tmp_path):
    hosted.write_record(tmp_path, "wandb", {"id": "abc1"})
    hosted.write_record(tmp_path, "mlflow", {"run_id": "def2", "store": "file:///x"})
    for name in (
        "wandb/offline-run-1-abc1/files/a",
        "wandb/run-2-other/a",
        "mlruns/7/def2/meta.yaml",
        "mlruns/7/e/meta.yaml",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    (tmp_path / "wandb" / "latest-run").symlink_to("offline-run-1-abc1")
    hosted.clear_local(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()}
    assert left == {hosted.RECORD, "wandb/run-2-other/a", "mlruns/7/e/meta.yaml"}
    hosted.write_record(tmp_path, "wandb", {"id": "*"})  # edited
    hosted.clear_local(tmp_path)
    assert (tmp_path / "wandb/run-2-other/a").is_file()


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a local file of W&B: a header of 7 bytes, then LevelDB's log format, blocks of 32 KiB."""
    assert data[:4] == b":W&B"
    at, record = 7, b""
    while at + 7 <= len(data):
        if (1 << 15) - at % (1 << 15) < 7:  # the end of a block is too short for a header
            at += (1 << 15) - at % (1 << 15)
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if not kind:
            break
        record, at = record + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def wandb_rows(out: Path) -> list[dict[int, dict[str, float]]]:
    """Epoch to scalars, of each local folder of W&B, by its own protobuf messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for file in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        rows: dict[int, dict[str, float]] = {}
        for history in (Record.FromString(data).history for data in wandb_records(file.read_bytes())):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
            if items:
                step = int(items["_step"])
                assert step not in rows
                rows[step] = {key: value for key, value in items.items() if not key.startswith("_")}
        found.append(rows)
    return found


def mlflow_rows(out: Path, home: Path) -> dict[int, dict[str, float]]:
    """Epoch to scalars, read by MLflow's client; no epoch twice."""
    import mlflow

    client = mlflow.MlflowClient((home / "mlruns").resolve().as_uri())
    key, rows = hosted.read_record(out)["mlflow"]["run_id"], {}
    assert client.get_run(key).info.status == "FINISHED"
    for name in client.get_run(key).data.metrics:
        for point in client.get_metric_history(key, name):
            assert name not in rows.setdefault(point.step, {})
            rows[point.step][name] = point.value
    return rows


def wanted(result) -> dict[int, dict[str, float]]:
    return {int(row["epoch"]): {hosted.tag(key): pytest.approx(value) for key, value in row.items() if key != "epoch"}
            for row in result.rows}  # fmt: skip


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No server, no key: what these packages do on a machine without a network."""
    for name in ("WANDB_API_KEY", "WANDB_DIR", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(hosted.importlib.util, "find_spec", _without_sqlalchemy(hosted.importlib.util.find_spec))
    monkeypatch.chdir(tmp_path)


def _without_sqlalchemy(find):
    return lambda name, *more: None if name == "sqlalchemy" else find(name, *more)


@pytest.mark.slow
def test_real_trackers_side_by_side_have_every_epoch_once_after_a_resume(config, offline, capsys):
    names = ("wandb", "mlflow", "tensorboard")
    finetune(config(epochs=3, stop_after=1, track=names))
    result = finetune(config(epochs=3, resume=True, track=names))
    assert wandb_rows(result.out) == [wanted(result)]
    assert mlflow_rows(result.out, result.out) == wanted(result)
    assert "wandb:" not in capsys.readouterr().out  # what libraries print would break --json
    first = hosted.read_record(result.out)
    again = finetune(config(epochs=1, overwrite=True, track=("mlflow",)))
    assert mlflow_rows(again.out, again.out) == wanted(again) and hosted.read_record(again.out).keys() == {"mlflow"}
    assert first["mlflow"]["run_id"] != hosted.read_record(again.out)["mlflow"]["run_id"]
    assert wandb_rows(again.out) == [] and len(list((again.out / "mlruns").glob("*/*/meta.yaml"))) == 1


@pytest.mark.slow
def test_each_task_of_a_joint_run_has_a_run_of_its_own(config, photos, offline):
    changes = {"data": None, "tasks": (f"a={photos}", f"b={photos}"), "epochs": 2, "track": ("wandb", "mlflow")}
    result = finetune_tasks(config(**changes))
    for name, run in result.tasks.items():
        assert wandb_rows(result.out / name) == [wanted(run)]
        assert mlflow_rows(result.out / name, result.out) == wanted(run)


def test_what_is_not_finite_is_left_out_and_options_are_plain(tmp_path, recorder):
    tracker = open_trackers(("wandb",), tmp_path, "vtk finetune x", [{"epoch": 1, "loss": float("nan"), "lr": 0.1}])[1]
    tracker.on_end()
    assert recorder.seen == [(1, {"train/lr": 0.1})]
    assert hosted._plain({"a": (1, 2), "b": Path("x"), "c": True}) == {"a": "1,2", "b": "x", "c": True}
