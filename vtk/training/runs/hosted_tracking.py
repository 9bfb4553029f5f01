"""Trackers that other programs host, Weights & Biases and MLflow, as callbacks through Accelerate's trackers.

A tracker works in a thread of its own, so that a slow or absent server delays no epoch, and none of its errors ends a
run: it is warned of once, and the tracker is left. Its run is recorded in ``RUN/trackers.json``; a resumed run goes on
with it and adds the epochs that are not there yet.
"""

import contextlib
import importlib
import importlib.util
import math
import os
import queue
import shutil
import threading
import uuid
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from vtk import console
from vtk.errors import DataError
from vtk.formats import read_json, write_json
from vtk.text import one_line
from vtk.training.engine.callbacks import Callback, EpochInfo

RECORD = "trackers.json"
"""File with the runs of a run's trackers, by tracker."""
MARK = "vtk_trackers"
"""Key by which the file is recognised."""
STORE = "mlruns"
"""Folder of MLflow's files in that of a run."""
PROJECT = "vtk"
"""Project (Weights & Biases) and experiment (MLflow), where the environment names none."""
_PATIENCE = 120.0
"""Seconds that the end of a run waits for a tracker's server."""

Row = Mapping[str, float]


class HostedTracker(Callback):
    """Base of the trackers: a thread, the rows that wait for it, and the record of its run.

    Args:
        out: folder of the run.
        home: the same, or in a run of several tasks the folder that they share.
        values: options of the run.
        rows: of the epochs done.
    """

    name: str
    packages: tuple[str, ...] = ("accelerate.tracking",)
    """Imported with the tracker's own before its thread starts."""

    def __init__(self, out: Path, home: Path, values: Mapping[str, Any], rows: Sequence[Row] = ()) -> None:
        self.out, self.home = out, home
        self.values = {key: value for key, value in values.items() if value is not None}
        self.title = f"{out.parent.name}/{out.name}".strip("/")
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._failure: str | None = None
        self._warned = False
        self._place = ""
        for row in rows:
            self._rows.put(dict(row))
        try:  # in this thread: loaders fork, and a child must not wait for an import of another thread
            for package in (*self.packages, self.name):
                importlib.import_module(package)
        except Exception as error:
            self._rows.put(None)
            self._failure = _reason(error)
        self._thread = threading.Thread(target=self._work, name=f"vtk-{self.name}", daemon=True)
        self._thread.start()

    @abstractmethod
    def open(self, known: Mapping[str, Any]) -> tuple[dict[str, Any], Collection[int], str]:
        """Start a run, or go on with a known one.

        Args:
            known: record of the run that is resumed; empty for a new one.

        Returns:
            The record of the run, the epochs that it has already, and where a person finds it.
        """

    @abstractmethod
    def log(self, scalars: Mapping[str, float], epoch: int) -> None:
        """Add the scalars of an epoch."""

    @abstractmethod
    def finish(self) -> None:
        """End the run; returns when everything has arrived."""

    def on_epoch(self, info: EpochInfo) -> None:
        """Hand over the numbers of an epoch."""
        self._rows.put(dict(info.metrics))
        self._warn()

    def on_end(self) -> None:
        """Wait for what is under way, with patience but not for ever."""
        self._rows.put(None)
        self._thread.join(_PATIENCE)
        if self._thread.is_alive() and self._failure is None:
            self._failure = f"its server takes more than {_PATIENCE:.0f} s"
        self._warn()
        if self._place and self._failure is None:
            console.say(f"{self.name}: {self._place}")

    def _work(self) -> None:
        """Log rows until the end, in this tracker's thread; MLflow keeps its active run for each thread."""
        started = False
        if self._failure is not None:
            return
        try:
            _start_accelerate()
            record, done, self._place = self.open(read_record(self.out).get(self.name, {}))
            started = True
            write_record(self.out, self.name, record)
            while (row := self._rows.get()) is not None:
                if (epoch := int(row["epoch"])) not in done:
                    self.log({tag(key): value for key, value in row.items() if _is_scalar(key, value)}, epoch)
        except BaseException as error:  # of any kind: wandb's and MLflow's own, and SystemExit
            self._failure = _reason(error)
        if started:
            try:
                self.finish()
            except BaseException as error:
                self._failure = self._failure or _reason(error)

    def _warn(self) -> None:
        if self._failure is not None and not self._warned:
            self._warned = True
            console.warn(
                f"--track {self.name}: {one_line(self._failure)[:300]}; the run goes on without it, metrics.csv has "
                "every epoch, and --resume adds them"
            )


class WandB(HostedTracker):
    """A run of Weights & Biases; ``WANDB_MODE``, ``WANDB_PROJECT``, ``WANDB_NAME`` and ``WANDB_DIR`` are followed."""

    name = "wandb"

    def open(self, known: Mapping[str, Any]) -> tuple[dict[str, Any], Collection[int], str]:
        """Start ``RUN/wandb``, or go on with a run of the server by its id."""
        import wandb
        from accelerate.tracking import WandBTracker

        key = str(known.get("id") or uuid.uuid4().hex[:12])
        if "WANDB_DIR" not in os.environ:
            clear_local_wandb(self.out, key)  # offline, all epochs are written anew into one folder
        self._tracker: Any = WandBTracker(
            os.environ.get("WANDB_PROJECT", PROJECT), id=key, resume="allow", config=_plain(self.values),
            name=os.environ.get("WANDB_NAME", self.title), dir=os.environ.get("WANDB_DIR", str(self.out)),
            reinit="create_new",  # the other tasks of the run, and the caller, have runs of their own
            settings=wandb.Settings(console="off"),
        )  # fmt: skip
        self._tracker.start()
        run = self._tracker.run
        return (
            {"id": key, "project": str(run.project)},
            range(int(run.step)),
            str(run.url or f"wandb sync {Path(run.dir).parent}"),
        )

    def log(self, scalars: Mapping[str, float], epoch: int) -> None:
        """Add the scalars of an epoch."""
        self._tracker.log(dict(scalars), step=epoch)

    def finish(self) -> None:
        """Wait until all is written or uploaded."""
        self._tracker.finish()


class MLflow(HostedTracker):
    """A run of MLflow, in ``MLFLOW_TRACKING_URI``; without, where MLflow itself would, or in ``RUN/mlruns``."""

    name = "mlflow"

    def open(self, known: Mapping[str, Any]) -> tuple[dict[str, Any], Collection[int], str]:
        """Make a run in the experiment, or go on with the known one."""
        import mlflow
        from accelerate.tracking import MLflowTracker

        uri = store_of(self.home, mlflow.get_tracking_uri())
        client = mlflow.MlflowClient(uri)
        key, done = str(known.get("run_id", "")), set[int]()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if key and known.get("store") == uri:
            done = {point.step for point in client.get_metric_history(key, tag("loss"))}
        else:
            found = client.get_experiment_by_name(experiment)
            place = client.create_experiment(experiment) if found is None else found.experiment_id
            above = os.environ.get("MLFLOW_RUN_ID")
            tags = {"mlflow.parentRunId": above} if above else None
            key = client.create_run(place, run_name=self.title, tags=tags).info.run_id
        mlflow.set_tracking_uri(uri)
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # standard output is the result's
        self._tracker: Any = MLflowTracker(experiment, run_id=key, nested_run=True)
        self._tracker.run_id = key  # Accelerate would let MLFLOW_RUN_ID replace it
        self._key = key
        self._tracker.start()
        if not done:  # parameters of a run cannot be changed
            self._tracker.store_init_configuration(_plain(self.values))
        return {"run_id": key, "store": uri}, done, f"run {key} in {uri}"

    def log(self, scalars: Mapping[str, float], epoch: int) -> None:
        """Add the scalars of an epoch."""
        self._tracker.log(dict(scalars), step=epoch, run_id=self._key)

    def finish(self) -> None:
        """End the run."""
        self._tracker.finish()


def tag(column: str) -> str:
    """Return the name of a column in a tracker: ``val_loss`` is ``val/loss``, ``loss`` is ``train/loss``."""
    return f"val/{column.removeprefix('val_')}" if column.startswith("val_") else f"train/{column}"


_OWN_STORES: set[str] = set()


def store_of(home: Path, uri: str) -> str:
    """Return where MLflow keeps a run: ``uri``, or a folder if that is a database that mlflow-skinny cannot open.

    Args:
        home: folder of the run; one for all its tasks, because MLflow has one store for the process.
        uri: MLflow's own choice.
    """
    chosen = "MLFLOW_TRACKING_URI" in os.environ
    if uri in _OWN_STORES or (
        not chosen and uri.startswith("sqlite:") and importlib.util.find_spec("sqlalchemy") is None
    ):  # an earlier run of this process has set its own
        uri = (home / STORE).resolve().as_uri()
        _OWN_STORES.add(uri)
    if uri.startswith("file:") or "://" not in uri:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3.17 asks for it
    return uri


def read_record(out: Path) -> dict[str, Any]:
    """Return the runs of a run's trackers; none if the file is absent or damaged."""
    with contextlib.suppress(DataError):
        found = read_json(out / RECORD) if (out / RECORD).is_file() else {}
        runs = found.get(MARK, {}) if isinstance(found, dict) else {}
        return {name: run for name, run in runs.items() if isinstance(run, dict)} if isinstance(runs, dict) else {}
    return {}


_RECORDING = threading.Lock()


def write_record(out: Path, name: str, record: Mapping[str, Any]) -> None:
    """Put a tracker's run into the record."""
    with _RECORDING:
        write_json(out / RECORD, {MARK: {**read_record(out), name: dict(record)}})


def clear_local(out: Path) -> None:
    """Remove what the trackers of an earlier run kept in its folder, and nothing else."""
    runs = read_record(out)
    if key := str(runs.get("wandb", {}).get("id", "")):
        clear_local_wandb(out, key)
    key = str(runs.get("mlflow", {}).get("run_id", ""))
    for store in (out / STORE, out.parent / STORE) if key.isalnum() else ():
        for file in store.glob(f"*/{key}/meta.yaml"):  # the store stays: MLflow remembers that it is there
            shutil.rmtree(file.parent, ignore_errors=True)


def clear_local_wandb(out: Path, key: str) -> None:
    """Remove the local folders of a run of Weights & Biases by its id, and the links to them."""
    place = out / "wandb"
    if not key.isalnum() or not place.is_dir():
        return
    for folder in place.glob(f"*run-*-{key}"):
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
    for link in place.iterdir():
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)
    if not any(place.iterdir()):
        place.rmdir()


def _reason(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _is_scalar(key: str, value: float) -> bool:
    return key != "epoch" and math.isfinite(value)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as both trackers take them: numbers, text, and lists as text."""
    return {
        key: value if isinstance(value, (bool, int, float, str)) else ",".join(map(str, value))
        if isinstance(value, (list, tuple)) else str(value) for key, value in values.items()
    }  # fmt: skip


def _start_accelerate() -> None:
    """Make the state that Accelerate's trackers log through; a run of several processes has it."""
    from accelerate import PartialState

    PartialState()
