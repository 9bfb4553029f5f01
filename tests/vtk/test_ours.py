"""Which files are ours: those that this version writes and those of 0.1, and not what has only the name."""

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from vtk import html, marks
from vtk.analysis.result_files import file_marks as analysis_marks
from vtk.errors import DataError
from vtk.packs.bundle import PACK_MARKS
from vtk.packs.to_peft import _MARKS as ADAPTER
from vtk.profiling.report import MARKS as PROFILE
from vtk.runtime.evaluation import MARKS as EVALUATION
from vtk.training.runs import outputs
from vtk_export.output_folder import MARKS as EXPORT
from vtk_export.tasks.index import known_files
from vtk_export.tasks.index import marks as tasks_marks

MADE = Path(__file__).resolve().parents[1] / "fixtures" / "v0_1"
OLD_PAGE = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    "<title>t</title><style>\n:root { color-scheme: light dark; --ink: #1c1c1e; --dim: #5f6368; "
)
"""How a page of version 0.1 begins."""


def plot(dpi: float = 130, metadata: dict[str, str] | None = None) -> bytes:
    """A plot as Matplotlib writes it; 0.1 told it nothing."""
    figure = Figure(figsize=(1, 1), dpi=dpi)
    FigureCanvasAgg(figure)
    figure.savefig(buffer := io.BytesIO(), format="png", metadata=metadata)
    return buffer.getvalue()


def pillow() -> bytes:
    Image.new("L", (4, 4)).save(buffer := io.BytesIO(), "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(("folder", "known"), [
    ("profile", lambda p: PROFILE), ("analysis", lambda p: analysis_marks(p, ())), ("exports/onnx", lambda p: EXPORT),
    ("exports/preproc", lambda p: EXPORT), ("exports/files", lambda p: tasks_marks(known_files(p))),
    ("exports/gathered", lambda p: tasks_marks(known_files(p))), ("digits-bf16", lambda p: PACK_MARKS),
    ("digits.vtkbundle", lambda p: PACK_MARKS), ("digits-peft", lambda p: ADAPTER),
    ("runs/digits", lambda p: outputs.MARKS), ("runs/lora", lambda p: outputs.MARKS),
    ("runs/both/digits", lambda p: outputs.MARKS), ("runs/both/parity", lambda p: outputs.MARKS),
])  # fmt: skip
def test_files_of_version_0_1_are_ours(folder: str, known: Callable[[Path], marks.Marks]) -> None:
    path = MADE / folder
    found = marks.find_own(path, known(path), "vtk")
    folders = () if not folder.startswith("runs") else ("task", "task-last", "last", "adapter")
    plain = [p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()]
    assert sorted(found) == sorted(name for name in plain if name.split("/")[0] not in folders) and found


def test_runs_of_version_0_1_can_be_overwritten_and_are_gone_then(tmp_path: Path) -> None:
    for name in ("digits", "lora", "both/digits"):
        run = shutil.copytree(MADE / "runs" / name, tmp_path / name)
        (run / "notes.txt").write_text("mine")
        (run / "curves.png").write_bytes(plot())
        outputs.check_run(run, overwrite=True, resume=False)
        outputs.clear_run(run)
        assert [p.name for p in run.iterdir()] == ["notes.txt"]


def test_plots_and_pages_of_version_0_1_are_ours_beside_their_numbers(tmp_path: Path) -> None:
    out = shutil.copytree(MADE / "profile", tmp_path / "profile")
    (out / "latency.png").write_bytes(plot())
    (out / "report.html").write_text(OLD_PAGE)
    assert set(marks.find_own(out, PROFILE, "vtk profile")) == set(PROFILE)
    (out / "profile.json").unlink()
    (out / "report.html").unlink()
    with pytest.raises(DataError, match=r"holds latency\.png"):  # a plot of anybody's
        marks.find_own(out, PROFILE, "vtk profile")


def test_plots_and_pages_of_this_version_are_ours_alone(tmp_path: Path) -> None:
    (tmp_path / "latency.png").write_bytes(plot(metadata=marks.SOFTWARE))
    (tmp_path / "report.html").write_text(html.document("t", "b"))
    assert sorted(marks.find_own(tmp_path, PROFILE, "vtk profile")) == ["latency.png", "report.html"]


CARD = (MADE / "exports" / "onnx" / "model.json").read_bytes()
OTHERS: dict[str, tuple[marks.Marks, str, bytes]] = {
    "a model of somebody": (EXPORT, "model.json", b'{"model": "resnet18", "classes": ["a", "b"]}'),
    "a model in a list": (EXPORT, "model.json", b"[" + CARD + b"]"),
    "a card cut short": (EXPORT, "model.json", CARD[:-10]),
    "an empty card": (EXPORT, "model.json", b""),
    "a graph of another exporter": (EXPORT, "model.onnx", b"\x08\x08\x12\x07pytorch" + b"\0" * 200),
    "weights alone": (EXPORT, "model.onnx.data", b"\0" * 64),
    "latency of another tool": (EXPORT, "latency.json", b'{"p50": 3}'),
    "a plot of theirs": (EXPORT, "latency.png", plot()),
    "a picture of theirs": (EXPORT, "latency.png", pillow()),
    "metrics of another program": (EVALUATION, "metrics.json", b'{"top1": 0.5, "loss": 1.0}'),
    "a table of theirs": (EVALUATION, "per_class.csv", b"class,count,share\n"),
    "a profile of another tool": (PROFILE, "profile.json", b'{"source": "x", "kind": "cpu"}'),
    "a page of theirs": (PROFILE, "report.html", b"<!doctype html><html><title>vtk</title></html>"),
    "a log of theirs": (outputs.MARKS, "metrics.csv", b"epoch,loss\n1,2\n"),
    "lines of theirs": (outputs.MARKS, "metrics.jsonl", b'{"step": 1, "loss": 2}\n'),
    "their settings": (outputs.MARKS, "config.yaml", b"model: resnet18\n"),
    "their weights": (outputs.MARKS, "model.safetensors", b"\x02\0\0\0\0\0\0\0{}"),
    "their adapter": (ADAPTER, "adapter_model.safetensors", b"\x02\0\0\0\0\0\0\0{}"),
    "their words": (ADAPTER, "README.md", b"# My adapter\n"),
    "their task": (PACK_MARKS, "task.json", b'{"tasks": []}'),
    "their base": (PACK_MARKS, "base.safetensors", b"\x02\0\0\0\0\0\0\0{}"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(OTHERS))
def test_a_name_alone_makes_no_file_ours(case: str, tmp_path: Path) -> None:
    known, name, data = OTHERS[case]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=rf"holds {name}, a file that `vtk` did not write; move it away") as caught:
        marks.find_own(tmp_path, known, "vtk")
    assert "\n" not in str(caught.value) and (tmp_path / name).read_bytes() == data


@pytest.mark.parametrize("name", ["task", "task-last", "task-small", "last", "adapter"])
def test_a_folder_that_no_run_wrote_stays(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    for file in outputs._INSIDE[name]:
        (tmp_path / name / file).write_text("{}")
    for flags in ({"overwrite": True, "resume": False}, {"overwrite": False, "resume": True}):
        with pytest.raises(DataError, match=rf"holds {name}, which no run wrote; move it away"):
            outputs.check_run(tmp_path, **flags)
    assert {p.name for p in (tmp_path / name).iterdir()} == outputs._INSIDE[name]


def test_a_copy_beside_a_runs_folder_is_somebodys(tmp_path: Path) -> None:
    run = shutil.copytree(MADE / "runs" / "digits", tmp_path / "run")
    shutil.copytree(run / "task", run / "task.old")
    (run / "last").rename(run / "last.old")  # what 0.1 left when it was killed between two renames
    outputs.check_run(run, overwrite=True, resume=False)
    outputs.clear_run(run)
    assert [p.name for p in run.iterdir()] == ["task.old"]
