"""The files of a run: their names, how they are recognised, and how they are removed and replaced."""

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtk import files
from vtk.errors import DataError
from vtk.files import existing_dir, old_places, prepare_output, write_text
from vtk.filesets import recover, replace_set
from vtk.locks import hold_folder
from vtk.marks import at, begins, find_own, header_with, json_lines_with, json_with, png, safetensors_with
from vtk.packages import require
from vtk.packs.adapters import CARD_KEY
from vtk.training.runs import hosted_tracking
from vtk.training.runs.tracking import clear_events

if TYPE_CHECKING:
    from vtk.evaluation.metrics import Metrics
    from vtk.evaluation.multilabel import MultiLabelMetrics

TASK, TASK_LAST, LAST, ADAPTER = "task", "task-last", "last", "adapter"
TASK_SMALL = "task-small"  # of `--pack-rank`
STATE_INFO = "state.json"  # in LAST
MODEL, MODEL_LAST = "model.safetensors", "model-last.safetensors"  # of a run that trains the whole model
FILES = (
    "config.yaml", "metrics.csv", "metrics.jsonl", "curves.png", "confusion.png", "per_class.csv", "audit.json",
    "census.json", "images.csv",
)  # fmt: skip
BACKBONE, TOKENIZER = "backbone.safetensors", "tokenizer.safetensors"  # of `vtk pretrain`
RECONSTRUCTION, SIMILARITY = "reconstruction.png", "similarity.png"
ALL_FILES = (*FILES, hosted_tracking.RECORD, MODEL, MODEL_LAST, BACKBONE, TOKENIZER, RECONSTRUCTION, SIMILARITY)
PLOTS = ("per_class.csv", "confusion.png", "curves.png", RECONSTRUCTION, SIMILARITY)
"""Plots and tables that are written at the end of a run."""
_WRITER = "a run of vtk"
_CONFIG = begins("# vtk ")
_PLOT = png(("config.yaml", _CONFIG))
MARKS = {
    "config.yaml": _CONFIG,
    "images.csv": begins("part,path,content\n"),
    "metrics.csv": header_with("epoch", "loss", "lr"),
    "metrics.jsonl": json_lines_with("epoch", "loss", "lr"),
    "audit.json": json_with("root", "classes", "train", "val"),
    "census.json": json_with("policy", "trained", "total"),
    **{name: _PLOT for name in PLOTS if name.endswith(".png")},
    "per_class.csv": begins("class,count,precision,recall,f1"),
    **dict.fromkeys((MODEL, MODEL_LAST, BACKBONE), safetensors_with("vtk")),
    TOKENIZER: safetensors_with("vtk_tokenizer"),
    hosted_tracking.RECORD: json_with(hosted_tracking.MARK),
}
"""Files of a run, each with the mark that identifies it."""
_INSIDE = {  # cleared in this order: a run without its packs must not look as if it could go on
    LAST: {"model.safetensors", "state.pt", "state.json"},
    TASK: {"task.json", "task.safetensors", "base_tensors.json"},
    TASK_LAST: {"task.json", "task.safetensors", "base_tensors.json"},
    TASK_SMALL: {"task.json", "task.safetensors", "base_tensors.json"},
    ADAPTER: {"adapter_config.json", "adapter_model.safetensors", "base.safetensors", "README.md"},
}
_CARD = json_with("model", "input", "classes", "schema")
_FOLDER_MARKS = {  # by what the folders of a run are recognised
    LAST: ("state.json", json_with("schema", "epoch", "rows", "flags")),
    TASK: ("task.json", _CARD),
    TASK_LAST: ("task.json", _CARD),
    TASK_SMALL: ("task.json", _CARD),
    ADAPTER: ("adapter_model.safetensors", safetensors_with(CARD_KEY)),
}


@contextlib.contextmanager
def hold_run(folders: Sequence[Path], command: str, *, main: bool) -> Iterator[None]:
    """Lock the folders of a run against other writers, in its main process; empty ones are removed at the end.

    Raises:
        DataError: another process writes to one of them, or it cannot be a folder.
    """
    with contextlib.ExitStack() as stack:
        for folder in folders if main else ():
            stack.enter_context(hold_folder(folder, command))
            recover(folder)
        yield


def check_run(out: Path, *, overwrite: bool, resume: bool) -> None:
    """Check that a run may write to ``out``; files of an earlier run stay until `clear_run`.

    Raises:
        DataError: ``out`` is not empty and neither flag was given, or holds somebody else's files under the names of a
            run.
        UnavailableError: what draws a run's plots is not installed.
    """
    require("matplotlib")
    if (out / LAST / STATE_INFO).is_file() and not (overwrite or resume):
        raise DataError(
            f"`--out` {out} holds a run: --resume goes on with it, --overwrite starts anew in its place; or give "
            "another folder"
        )
    prepare_output(out, overwrite=overwrite, resume=resume)
    find_own(out, MARKS, _WRITER)
    for folder in _own_folders(out):
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise DataError(f"{folder} is not the folder that a run writes; move it away, or give another --out")
        if not folder.is_dir() or not any(folder.iterdir()):
            continue
        if overwrite and (foreign := sorted({p.name for p in folder.iterdir()} - _INSIDE[_plain(folder)])):
            raise DataError(f"`--overwrite`: {folder} holds {foreign[0]}, which no run wrote; move it away")
        if not _is_ours(folder):
            raise DataError(
                f"`--out` {out} holds {folder.name}, which no run wrote; move it away, or give another folder"
            )


def sweep(out: Path) -> None:
    """Delete the temporary files and folders of a run that was killed while it wrote them."""
    files.sweep(out, lambda name: name in ALL_FILES or name in _INSIDE)


def check_best(out: Path, train: str, *, complete: bool = False) -> None:
    """Check that the best pack of a run to be resumed is still there: nothing could write it again.

    Args:
        out: folder of the run.
        train: its policy.
        complete: it has done all epochs, so that its last pack could not be written again either.

    Raises:
        DataError: the pack or, of LoRA, the adapter is gone.
    """
    for folder in (
        out / name for name in (TASK, *((TASK_LAST,) if complete else ()), *((ADAPTER,) if train == "lora" else ()))
    ):
        if not existing_dir(folder).is_dir():
            which = "of the last epoch" if folder.name == TASK_LAST else "the best so far"
            raise DataError(
                f"`--resume`: {folder}, {which}, is gone; put it back, or give --overwrite in place of --resume"
            )


def clear_run(out: Path) -> None:
    """Remove the files of an earlier run, of any kind, from ``out``, and nothing else."""
    for folder in _own_folders(out):
        if folder.is_dir():
            shutil.rmtree(folder)
    hosted_tracking.clear_local(out)
    for name in find_own(out, MARKS, _WRITER):
        (out / name).unlink(missing_ok=True)
    clear_events(out)


def clear_plots(out: Path) -> None:
    """Remove the plots and the compressed pack of an earlier part of a run, which what is trained now contradicts."""
    clear_small(out)
    for name in find_own(out, {name: MARKS[name] for name in PLOTS}, _WRITER):
        (out / name).unlink(missing_ok=True)


def clear_small(out: Path) -> None:
    """Remove the compressed pack of a run, which another best pack would contradict."""
    if _is_ours(out / TASK_SMALL):
        shutil.rmtree(out / TASK_SMALL)


def _folders(out: Path) -> list[Path]:
    """Return the folders of a run, and the places where a killed writer may have left them."""
    folders = [out / name for name in _INSIDE]
    return folders + [old for path in folders for old in old_places(path)]


def _own_folders(out: Path) -> list[Path]:
    """Return the `_folders` of the run itself: a name with .old beside its folder is a user's copy."""
    return [
        folder for folder in _folders(out)
        if folder.suffix != ".old" or (not folder.with_suffix("").exists() and _is_ours(folder))
    ]  # fmt: skip


def _plain(folder: Path) -> str:
    """Return the name of a run's folder, without the suffix of a folder that was replaced."""
    return folder.name.removesuffix(".old").removesuffix(".vtk-old").removeprefix(".")


def _is_ours(folder: Path) -> bool:
    name, mark = _FOLDER_MARKS[_plain(folder)]
    return folder.is_dir() and at(folder / name, mark)()


def replace_plots(out: Path) -> contextlib.AbstractContextManager[Path]:
    """Return a context with a folder for new plots, which replace all plots of a run at its end."""
    return replace_set(out, {name: MARKS[name] for name in PLOTS}, _WRITER)


def write_plots(
    out: Path, rows: Sequence[Mapping[str, Any]], metrics: "Metrics | MultiLabelMetrics | None" = None
) -> None:
    """Write ``curves.png`` and, of the best epoch, ``per_class.csv`` and ``confusion.png``, all of them or none.

    Args:
        out: folder of the run.
        rows: numbers of every epoch.
        metrics: of the best epoch; several labels an image have no ``confusion.png``.
    """
    from vtk.evaluation.metrics import Metrics
    from vtk.evaluation.result_files import confusion_png, per_class_csv

    with replace_plots(out) as staged:
        if metrics is not None:
            write_text(staged / "per_class.csv", per_class_csv(metrics))
        if isinstance(metrics, Metrics):
            confusion_png(metrics, staged / "confusion.png")
        draw_curves(staged, rows)


def draw_curves(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw ``curves.png``."""
    from vtk.evaluation.result_files import curves_png

    curves_png(rows, folder / "curves.png")
