"""Prints a profile as tables, and writes its files: JSON, CSV, plot and a self-contained page."""

import csv
import dataclasses
import io
import textwrap
from pathlib import Path

from vtk import console
from vtk.files import write_bytes, write_text
from vtk.filesets import replace_set
from vtk.formats import write_json
from vtk.marks import begins, json_with, png
from vtk.marks import page as page_mark
from vtk.profiling.cells import Cell
from vtk.profiling.html import page
from vtk.profiling.result import ProfileResult
from vtk.profiling.rows import columns, heading, notes, title, values, work_columns, work_values

WIDTH = 80
_JSON = json_with("source", "kind", "backends", "input_shape", "reference")
MARKS = {
    "report.html": page_mark(),
    "latency.png": png(("profile.json", _JSON), ("report.html", page_mark())),
    "profile.json": _JSON,
    "profile.csv": begins("source,backend,provider,device,precision,threads,batch,status,"),
}
"""Files of a report, and how they are recognised."""
FILES = tuple(MARKS)


def print_result(result: ProfileResult) -> None:
    """Print a table per back-end within 80 columns, then the notes, then the choice for the budget."""
    console.say()
    for line in textwrap.wrap(title(result), WIDTH, break_on_hyphens=False):
        console.say(line, style="bold")
    for backend in result.backends:
        console.say()
        for line in textwrap.wrap(heading(backend), WIDTH, subsequent_indent="  ", break_on_hyphens=False):
            console.say(line, style="bold")
        if backend.cells:
            console.say(_line(columns(backend)), style="dim")
        for cell in backend.cells:
            if cell.status == "ok":
                console.say(_line(values(backend, cell)))
            else:
                indent = " " * 8
                text = f"{cell.batch:>6}  {cell.reason}"
                console.say(*textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False))
        rows = [work_values(result, cell) for cell in backend.cells if cell.status == "ok"]
        if names := work_columns(backend):
            console.say(_line(["batch", "", *names]), style="dim")
            for row in rows:
                console.say(_line([row["batch"], "", *(row[name] for name in names)]))
    console.say()
    for note in notes(result):
        console.say(*textwrap.wrap(note, WIDTH, subsequent_indent="  ", break_on_hyphens=False), style="dim")
    for warning in result.warnings:
        console.warn(warning)
    if result.budget:
        console.say()
        console.say(*textwrap.wrap(result.budget, WIDTH, subsequent_indent="  ", break_on_hyphens=False), style="bold")


def write_reports(result: ProfileResult, folder: Path) -> tuple[Path, ...]:
    """Write `FILES` into ``folder``, all of them or none, and return their paths.

    Raises:
        DataError: the folder cannot be written.
    """
    with replace_set(folder, MARKS, "vtk profile") as staged:
        put_reports(result, staged)
    return tuple(folder / name for name in FILES)


def put_reports(result: ProfileResult, staged: Path) -> None:
    """Write `FILES` into a folder that nobody reads yet."""
    from vtk.profiling.plot import latency_png

    plot = latency_png(result)
    write_json(staged / "profile.json", result.to_dict())
    write_text(staged / "profile.csv", to_csv(result))
    write_bytes(staged / "latency.png", plot)
    write_text(staged / "report.html", page(result, plot, latency_png(result, stacked=True)))


def to_csv(result: ProfileResult) -> str:
    """Return one row per cell, and one for each back-end without cells; empty fields are unknown."""
    names = [f.name for f in dataclasses.fields(Cell)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["source", "backend", "provider", "device", "precision", "threads", *names])
    for backend in result.backends:
        place = [result.source, backend.name, backend.provider, backend.device or result.device]
        for cell in backend.cells:
            row = [getattr(cell, name) for name in names]
            writer.writerow([*place, result.precision, result.threads, *row])
        if not backend.cells:
            row = [{"status": backend.status, "reason": backend.reason}.get(name) for name in names]
            writer.writerow([*place, result.precision, result.threads, *row])
    return text.getvalue()


def _line(row: list[str]) -> str:
    return "".join(f"{text:>{width}}" for text, width in zip(row, (5, 7, 9, 9, 9, 10, 10, 10, 10), strict=False))
