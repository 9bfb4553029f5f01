"""Where the numbers of a run's epochs go besides ``metrics.csv`` and ``metrics.jsonl``: TensorBoard."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from vtk.errors import UnavailableError

FOLDER = "tensorboard"
EVENTS = "events.out.tfevents.*"


class Tracker(Protocol):
    """Takes the numbers of one epoch after another."""

    def write(self, row: Mapping[str, float]) -> None:
        """Take the row of an epoch, as ``metrics.csv`` has it."""

    def close(self) -> None:
        """Write what is still to be written."""


class TensorBoard:
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

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def tag(column: str) -> str:
    """Return TensorBoard's name of a column: ``val_loss`` is ``val/loss``, ``loss`` is ``train/loss``."""
    return f"val/{column.removeprefix('val_')}" if column.startswith("val_") else f"train/{column}"


def check_trackers(names: Sequence[str]) -> None:
    """Make sure that what trackers need is here.

    Raises:
        UnavailableError: a package is not installed.
    """
    if "tensorboard" in names and importlib.util.find_spec("tensorboard") is None:
        raise UnavailableError(
            "`--track` tensorboard needs the package of that name; pip install 'vit-toolkit[tensorboard]', or leave it "
            "out: metrics.csv is always written"
        )


def open_trackers(
    names: Sequence[str], out: Path, command: str, rows: Sequence[Mapping[str, float]] = ()
) -> list[Tracker]:
    """Return the trackers of a run; ``csv`` needs none, since every run writes it."""
    return [TensorBoard(out, command, rows)] if "tensorboard" in names else []


def clear_events(out: Path) -> None:
    """Remove what an earlier run wrote for TensorBoard, and nothing else."""
    folder = out / FOLDER
    for path in folder.glob(EVENTS):
        path.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
