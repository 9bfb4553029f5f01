"""Trackers of a run's metrics, as callbacks: ``metrics.csv`` and ``metrics.jsonl``, TensorBoard, and hosted ones."""

import csv
import importlib.util
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vtk.errors import UnavailableError
from vtk.files import write_text
from vtk.marks import says
from vtk.packages import require
from vtk.training.engine.callbacks import Callback, EpochInfo
from vtk.training.runs import hosted_tracking as hosted
from vtk.training.runs.hosted_tracking import tag

FOLDER = "tensorboard"
EVENTS = "events.out.tfevents.*"
_HOSTED: Mapping[str, type[hosted.HostedTracker]] = {"wandb": hosted.WandB, "mlflow": hosted.MLflow}


class MetricsFiles(Callback):
    """``RUN/metrics.csv`` and ``RUN/metrics.jsonl``, written anew after every epoch.

    Args:
        out: folder of the run.
        rows: of the epochs done.
    """

    def __init__(self, out: Path, rows: Sequence[Mapping[str, float]] = ()) -> None:
        self.out, self.rows = out, [dict(row) for row in rows]

    def on_epoch(self, info: EpochInfo) -> None:
        """Write all rows."""
        self.rows.append(dict(info.metrics))
        write_rows(self.out, self.rows)


class TensorBoard(Callback):
    """Scalars of every epoch in ``RUN/tensorboard``, under ``train/…`` and ``val/…``.

    A resumed run writes the earlier epochs anew, so that each is there once, whatever a stopped run left behind.

    Args:
        out: folder of the run.
        command: kept as text.
        rows: of the epochs done.
    """

    def __init__(self, out: Path, command: str, rows: Sequence[Mapping[str, float]] = ()) -> None:
        from torch.utils.tensorboard import SummaryWriter

        clear_events(out)
        self._writer: Any = SummaryWriter(str(out / FOLDER))  # type: ignore[no-untyped-call]
        self._writer.add_text("command", command)
        for row in rows:
            self.write(row)

    def write(self, row: Mapping[str, float]) -> None:
        """Add the scalars of an epoch."""
        epoch = int(row["epoch"])
        for key, value in row.items():
            if key != "epoch":
                self._writer.add_scalar(tag(key), value, epoch)
        self._writer.flush()

    def on_epoch(self, info: EpochInfo) -> None:
        """Add the scalars of an epoch."""
        self.write(info.metrics)

    def on_end(self) -> None:
        """Close the file."""
        self._writer.close()


def check_trackers(names: Sequence[str]) -> None:
    """Check that the packages of the trackers are installed.

    Raises:
        UnavailableError: a package is not installed.
    """
    for name in names:
        if name != "csv" and importlib.util.find_spec(name) is None:
            raise UnavailableError(
                f"`--track` {name} needs the package of that name; pip install 'vit-toolkit[{name}]', or leave it out: "
                "metrics.csv is always written"
            )
    if set(names) & _HOSTED.keys():
        require("accelerate")


def open_trackers(
    names: Sequence[str], out: Path, command: str, rows: Sequence[Mapping[str, float]] = (), *,
    home: Path | None = None, values: Mapping[str, Any] | None = None,
) -> list[Callback]:  # fmt: skip
    """Return the trackers of a run; every run has the tables of ``csv``.

    Args:
        names: of ``--track``.
        out: folder of the run.
        command: its command line.
        rows: of the epochs done.
        home: in a run of several tasks, the folder that they share.
        values: its options, which hosted trackers show.
    """
    more: list[Callback] = [TensorBoard(out, command, rows)] if "tensorboard" in names else []
    return [MetricsFiles(out, rows), *more, *_open_hosted(names, out, command, rows, home, values)]


def complete_trackers(
    names: Sequence[str], out: Path, command: str, rows: Sequence[Mapping[str, float]], *,
    home: Path | None = None, values: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Add the epochs of a complete run that hosted trackers lack; arguments as of `open_trackers`."""
    for tracker in _open_hosted(names, out, command, rows, home, values):
        tracker.on_end()


def _open_hosted(
    names: Sequence[str], out: Path, command: str, rows: Sequence[Mapping[str, float]], home: Path | None,
    values: Mapping[str, Any] | None,
) -> list[Callback]:  # fmt: skip
    own = {"command": command, **(values or {})}
    return [kind(out, home or out, own, rows) for name, kind in _HOSTED.items() if name in names]


def write_rows(out: Path, rows: Sequence[Mapping[str, float]]) -> None:
    """Write the metrics per epoch as ``metrics.csv`` and ``metrics.jsonl``."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    whole = [{k: int(v) if k == "epoch" else v for k, v in row.items()} for row in rows]
    writer.writerows(whole)
    write_text(out / "metrics.csv", text.getvalue())
    write_text(out / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in whole))


def clear_events(out: Path) -> None:
    """Remove the TensorBoard files of an earlier run, and nothing else."""
    folder = out / FOLDER
    for path in folder.glob(EVENTS):
        if says("command/text_summary")(path):  # another program's events may be there, too
            path.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
