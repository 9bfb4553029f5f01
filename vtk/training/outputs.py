"""The files of a run: which there are, how they are cleared away, and how they are written."""

import contextlib
import dataclasses
import platform
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from vtk import files
from vtk.errors import DataError
from vtk.files import existing_dir, prepare_output, write_text
from vtk.options import option_of
from vtk.options.config import flag_of
from vtk.packages import require
from vtk.training.recipes import is_file
from vtk.training.tracking import clear_events
from vtk.training.train_config import RunConfig

if TYPE_CHECKING:
    from vtk.evaluation.metrics import Metrics
    from vtk.evaluation.multilabel import MultiLabelMetrics

TASK, TASK_LAST, LAST, ADAPTER = "task", "task-last", "last", "adapter"
MODEL, MODEL_LAST = "model.safetensors", "model-last.safetensors"  # of a run that trains the whole model
FILES = (
    "config.yaml", "metrics.csv", "metrics.jsonl", "curves.png", "confusion.png", "per_class.csv", "audit.json",
    "census.json", "images.csv",
)  # fmt: skip
BACKBONE, TOKENIZER = "backbone.safetensors", "tokenizer.safetensors"  # of `vtk pretrain`
RECONSTRUCTION, SIMILARITY = "reconstruction.png", "similarity.png"
ALL_FILES = (*FILES, MODEL, MODEL_LAST, BACKBONE, TOKENIZER, RECONSTRUCTION, SIMILARITY)
_INSIDE = {  # cleared in this order: a run without its packs must not look as if it could go on
    LAST: {"model.safetensors", "state.pt", "state.json"},
    TASK: {"task.json", "task.safetensors", "base_tensors.json"},
    TASK_LAST: {"task.json", "task.safetensors", "base_tensors.json"},
    ADAPTER: {"adapter_config.json", "adapter_model.safetensors", "base.safetensors", "README.md"},
}


def check_run(out: Path, *, overwrite: bool, resume: bool) -> None:
    """Make sure that a run may go to ``out``; what an earlier one left there stays until `clear_run`.

    Raises:
        DataError: ``out`` is not empty and neither flag was given, or a pack's folder holds foreign files.
        UnavailableError: what draws a run's plots is not installed.
    """
    require("matplotlib")
    prepare_output(out, overwrite=overwrite, resume=resume)
    if not overwrite:
        return
    for folder in _folders(out):
        own = _INSIDE[folder.name.removesuffix(".old")]
        if folder.is_dir() and (foreign := sorted({p.name for p in folder.iterdir()} - own)):
            raise DataError(f"`--overwrite`: {folder} holds {foreign[0]}, which no run wrote; move it away")


@contextlib.contextmanager
def no_empty_folder(out: Path) -> Iterator[None]:
    """Take ``out`` away again if what is inside the context fails and the folder is empty."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            out.rmdir()
        raise


def sweep(out: Path) -> None:
    """Delete the temporary files and folders of a run that was killed while it wrote them."""
    files.sweep(out, lambda name: name in ALL_FILES or name in _INSIDE)


def check_best(out: Path, train: str, *, complete: bool = False) -> None:
    """Make sure that what a run to be resumed left as its best is still there: nothing could write it again.

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
    """Remove what an earlier run, of whatever kind, wrote to ``out``, and nothing else."""
    for folder in _folders(out):
        if folder.is_dir():
            shutil.rmtree(folder)
    for name in ALL_FILES:
        (out / name).unlink(missing_ok=True)
    clear_events(out)


def _folders(out: Path) -> list[Path]:
    return [out / name for name in _INSIDE] + [out / f"{name}.old" for name in _INSIDE]


def config_text(config: RunConfig) -> str:
    """Return the effective config as YAML that ``--config`` reads back; what belongs to one call is left out."""
    values = dataclasses.asdict(config)
    for name in ("resume", "overwrite", "stop_after", "data", "out", "attn_only", "dry_run"):
        values.pop(name, None)
    if is_file(values.get("recipe")):  # its values are all here, and the file may be gone by then
        values["recipe"] = None
    plain = {k: list(v) if isinstance(v, tuple) else str(v) if isinstance(v, Path) else v for k, v in values.items()}
    data = "" if config.tasks else " DATA"
    head = f"# {command_line(config)}\n# vtk {config.command} --config THIS-FILE{data} repeats the run\n"
    return head + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def command_line(config: RunConfig) -> str:
    """Return the command of this run: data, and each flag whose value is not the default; ``--out`` is left out."""
    words = ["vtk", config.command, *([] if config.data is None else [str(config.data)])]
    defaults = config.defaults()
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if (
            f.name in ("data", "out", "resume", "overwrite", "stop_after", "workers", "dry_run", "track", "save_every")
            or value == defaults[f.name]
        ):
            continue
        if f.name == "memory" and value != "gelu8":  # the other modes change no result
            continue
        flag = flag_of(type(config), f.name).removeprefix("--")
        if option_of(type(config), f.name).flag and isinstance(value, tuple):  # once for each
            words += [word for each in value for word in (f"--{flag}", str(each))]
        elif isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
    return shlex.join(words)


def versions() -> dict[str, str]:
    """Return the versions that a card records."""
    found = {"python": platform.python_version()}
    for key, name in (("torch", "torch"), ("timm", "timm"), ("vtk", "vit-toolkit")):
        try:
            found[key] = version(name)
        except PackageNotFoundError:  # run from a checkout
            from vtk import __version__

            found[key] = __version__ if key == "vtk" else "unknown"
    return found


def write_best(out: Path, metrics: "Metrics | MultiLabelMetrics") -> None:
    """Write ``per_class.csv`` of the best epoch and, of images with one label, ``confusion.png``."""
    from vtk.evaluation.metrics import Metrics
    from vtk.evaluation.plots import confusion_png
    from vtk.evaluation.rows import per_class_csv

    write_text(out / "per_class.csv", per_class_csv(metrics))
    if isinstance(metrics, Metrics):
        confusion_png(metrics, out / "confusion.png")


def write_curves(out: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw ``curves.png``."""
    from vtk.evaluation.plots import curves_png

    curves_png(rows, out / "curves.png")
