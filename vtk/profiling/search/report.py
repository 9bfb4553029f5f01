"""Prints a search as tables of 80 columns, and writes its files: JSON, CSV and the plot of the frontier."""

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
from vtk.profiling.rows import DASH, ms, rate
from vtk.profiling.search.accuracy import Verdict
from vtk.profiling.search.result import WHY, SearchResult, SetupResult

WIDTH = 80
_JSON = json_with("source", "budget_ms", "setups", "accuracy", "percentile")
MARKS = {
    "frontier.png": png(("search.json", _JSON)),
    "search.json": _JSON,
    "search.csv": begins("source,backend,precision,batch,threads,instances,status,"),
}
"""Files of a search, and how they are recognised."""
FILES = tuple(MARKS)

_WIDTHS = (10, 13, 7, 8, 10, 9, 9, 10)
_COLUMNS = ("back-end", "precision", "batch", "threads", "instances")


def print_search(result: SearchResult) -> None:
    """Print the accuracy gate, the best setup of each back-end and precision, the frontier and the recommendation."""
    chans, height, width = result.input_shape
    threads = f"{result.cpus} CPU{'s' * (result.cpus != 1)}"
    title = f"{result.source} ({result.model}) · {chans}×{height}×{width} · {result.device_name}, {threads}"
    console.say()
    _say(title, style="bold")
    console.say()
    for verdict in result.accuracy:
        _say(accuracy_line(verdict))
    best = best_of_each(result)
    if best:
        _table("best of each back-end and precision", best, result)
    edge = sorted((row for row in result.setups if row.frontier), key=lambda row: row.judged_ms or 0.0)
    if edge:
        _table("frontier: no other setup has more images/s at no more latency", edge, result)
    failed = [row for row in result.setups if row.status == "failed" and row.reason]
    for reason in dict.fromkeys(row.reason for row in failed):
        _say(f"failed: {next(row for row in failed if row.reason == reason).setup.text}: {reason}")
    console.say()
    for note in notes(result):
        _say(note, style="dim")
    if result.choice is None:
        return
    console.say()
    _say(result.choice.text, style="bold")
    if result.faster:
        _say(result.faster)
    _say(result.note)
    if result.command:
        console.say()
        console.say(f"  {result.command}")


def accuracy_line(verdict: Verdict) -> str:
    """Return what a back-end and a precision cost in accuracy, or why they are left out."""
    name = f"{verdict.backend} {verdict.precision}: "
    found = verdict.judgement
    if found is None:
        return name + (f"left out: {verdict.reason}" if verdict.reason else "accuracy not measured; give --data")
    text = f"agreement {console.percent(found.agreement, 1)}"
    if found.top1 is not None and found.top1_fp32 is not None:
        text += f", top-1 {console.percent(found.top1, 1)} (fp32 {console.percent(found.top1_fp32, 1)})"
    text += f" on {found.count} {found.what}"
    return name + (text if verdict.passed else f"left out: {verdict.reason}")


def best_of_each(result: SearchResult) -> list[SetupResult]:
    """Return the setup with the most images per second within the budget of each back-end and precision, or none."""
    found: dict[tuple[str, str], SetupResult] = {}
    for row in result.setups:
        key = row.backend, row.precision
        if row.meets and (key not in found or (row.images_per_second or 0) > (found[key].images_per_second or 0)):
            found[key] = row
    return sorted(found.values(), key=lambda row: -(row.images_per_second or 0.0))


def notes(result: SearchResult) -> list[str]:
    """Return what the numbers mean."""
    count = {status: sum(row.status == status for row in result.setups) for status in WHY}
    text = ", ".join(f"{n} {status} ({WHY[status]})" for status, n in count.items() if n)
    share = f"{result.search_s:.0f} s; all of them for {result.duration_s:g} s take {result.exhaustive_s:.0f} s"
    found = [
        f"{len(result.setups)} setups: {text}. {share}.",
        f"p{result.percentile} is the highest percentile for which a setup within the budget has runs enough in "
        f"{result.duration_s:g} s; ~ measured briefly. All instances run at once, each call after the other.",
        f"outputs compared with {result.reference}, before timing and after each window. inputs: {result.inputs}.",
    ]
    if result.cut:
        found.append("caution: the search's time was up; others may be a little better (--duration, --exhaustive).")
    return found


def write_search(result: SearchResult, folder: Path) -> None:
    """Write `FILES` into ``folder``, all of them or none.

    Raises:
        DataError: the folder cannot be written.
    """
    from vtk.profiling.search.plot import frontier_png

    with replace_set(folder, MARKS, "vtk profile") as staged:
        write_json(staged / "search.json", result.to_dict())
        write_text(staged / "search.csv", to_csv(result))
        write_bytes(staged / "frontier.png", frontier_png(result))


def to_csv(result: SearchResult) -> str:
    """Return one row per setup; empty fields are unknown."""
    names = [f.name for f in dataclasses.fields(SetupResult)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["source", *names])
    for row in result.setups:
        writer.writerow([result.source, *(getattr(row, name) for name in names)])
    return text.getvalue()


def _table(title: str, rows: list[SetupResult], result: SearchResult) -> None:
    console.say()
    console.say(title, style="bold")
    console.say(_line([*_COLUMNS, f"p{result.percentile} ms", "images/s"]), style="dim")
    for row in rows:
        mark = "" if row.status == "complete" else "~"
        place = [row.backend, row.precision, str(row.batch), str(row.threads), str(row.instances)]
        console.say(_line([*place, f"{mark}{ms(row.judged_ms)}", rate(row.images_per_second) or DASH]))


def _line(row: list[str]) -> str:
    left = "".join(f"{text:<{width}}" for text, width in zip(row[:2], _WIDTHS, strict=False))
    return left + "".join(f"{text:>{width}}" for text, width in zip(row[2:], _WIDTHS[2:], strict=False))


def _say(text: str, style: str | None = None) -> None:
    console.say(*textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False), style=style)
