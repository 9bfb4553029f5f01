"""Prints the result of a load test, and writes ``server.json`` and a self-contained page."""

import base64
import itertools
import textwrap
from html import escape
from pathlib import Path
from typing import Any

from vtk import console
from vtk.files import write_text
from vtk.filesets import replace_set
from vtk.formats import write_json
from vtk.html import document, table
from vtk.marks import json_with
from vtk.marks import page as page_mark
from vtk.profiling.figures import DIM, caption, frame, legend, log_ticks, new_figure, style, to_png
from vtk.profiling.report import WIDTH
from vtk.profiling.rows import DASH, UNSTABLE, rate
from vtk.profiling.server.result import ServerLevel, ServerResult

MARKS = {"server.html": page_mark(), "server.json": json_with("server", "protocol", "levels")}
"""Files of a report, and how they are recognised."""
FILES = tuple(MARKS)
COLUMNS = ("batch", "load", "images/s", "p50", "p90", "p99", "queue", "compute", "joined", "req")
"""Times in milliseconds; ``joined`` is how many images the server ran at once."""


def print_result(result: ServerResult) -> None:
    """Print a row for every load, the notes, and the choice for the budget."""
    console.say(heading(result), style="bold")
    rows = [row(level) for level in by_load(result) if level.status == "ok"]
    console.table("times in ms", COLUMNS, rows, left=(1,))
    for level in result.levels:
        if level.status != "ok":
            text = f"batch {level.batch}, {level.load}: {level.reason}"
            console.say(*textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    for text in notes(result):
        console.say(*textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False), style="dim")
    for text in result.warnings:
        console.warn(text)
    if result.budget:
        console.say(*textwrap.wrap(result.budget, WIDTH, subsequent_indent="  ", break_on_hyphens=False), style="bold")


def write_report(result: ServerResult, folder: Path) -> None:
    """Write `FILES` into ``folder``, all of them or none.

    Raises:
        DataError: the folder cannot be written.
    """
    with replace_set(folder, MARKS, "vtk profile") as staged:
        write_json(staged / "server.json", result.to_dict())
        write_text(staged / "server.html", page(result))


def page(result: ServerResult) -> str:
    """Return the page as HTML; every text from outside is escaped."""
    picture = base64.b64encode(png(result)).decode("ascii")
    parts = [f"<h1>A server under load</h1><p>{escape(heading(result))}</p>"]
    if result.budget:
        parts.append(f'<p class="budget">{escape(result.budget)}</p>')
    parts += [f'<p class="warning">{escape(text)}</p>' for text in result.warnings]
    parts.append(f'<img alt="Latency against images per second" src="data:image/png;base64,{picture}">')
    rows = []
    for level in by_load(result):
        if level.status == "ok":
            rows.append("".join(f"<td>{escape(text)}</td>" for text in row(level)))
        else:
            first = f"<td>{level.batch}</td><td>{escape(level.load)}</td>"
            rows.append(f'{first}<td class="bad" colspan="{len(COLUMNS) - 2}">{escape(level.reason)}</td>')
    parts.append(f"<h2>Every load</h2>{table(list(COLUMNS), rows)}")
    parts.append("<h2>How to read this</h2><ul>" + "".join(f"<li>{escape(n)}</li>" for n in notes(result)) + "</ul>")
    facts = "".join(
        f"<dt class=dim>{k}</dt><dd>{escape(v)}</dd>"
        for k, v in (("command", result.command), ("date", result.date)) if v
    )  # fmt: skip
    parts.append(f"<h2>Environment</h2><dl>{facts}</dl>")
    return document(f"{result.model}: a server under load", "\n".join(parts))


def heading(result: ServerResult) -> str:
    """Return model, version, platform and address in one line."""
    version = f" version {result.version}" if result.version else ""
    platform = f", {result.platform}" if result.platform else ""
    return f"{result.model}{version}{platform} at {result.server} ({result.protocol})"


def by_load(result: ServerResult) -> list[ServerLevel]:
    """Return the loads from the lightest on; a search measures them in another order."""
    return sorted(result.levels, key=lambda v: (v.batch, v.loop, v.concurrency or 0, v.rate or 0.0))


def row(level: ServerLevel) -> list[str]:
    """Return the cells of a load."""
    mark = UNSTABLE if level.stable is False else ""
    joined = DASH if level.server_batch is None else f"{level.server_batch:.1f}"
    times = (level.p50_ms, level.p90_ms, level.p99_ms, level.queue_ms, level.compute_ms)
    return [
        str(level.batch), level.load, rate(level.images_per_second), *map(_short, times), joined,
        f"{mark}{level.requests}",
    ]  # fmt: skip


def _short(value: float | None) -> str:
    """Format milliseconds with three digits: ten columns have to go beside one another on a phone."""
    return DASH if value is None else f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def notes(result: ServerResult) -> list[str]:
    """Return the notes below the table."""
    found = [f"answers: {result.reference}.", f"sent: {result.inputs}."]
    if answered := sum(level.requests for level in result.levels):
        checked = sum(level.checked for level in result.levels)
        found.append(f"answers compared: {checked:,}, most of them under load, warm-ups included; timed: {answered:,}.")
    loops = {level.loop for level in result.levels}
    if "closed" in loops:
        found.append(
            "clients (closed loop): each sends its next request when it has its answer; a stalled server gets fewer "
            "requests, so these percentiles are optimistic."
        )
    if "open" in loops:
        found.append(
            "req/s (open loop): requests are due at random times (Poisson) and timed from then on, so that a stall "
            "counts for every request due meanwhile (no coordinated omission)."
        )
    if any(level.queue_ms is not None for level in result.levels):
        found.append("queue, compute, joined: the server's own statistics, means over the requests of this load.")
    return found


def png(result: ServerResult) -> bytes:
    """Draw p50, p90 and p99 against images per second, a colour for each batch size and loop."""
    figure = new_figure(5.4, 4.2)
    axes: Any = figure.subplots()
    timed = sorted((v for v in result.levels if v.status == "ok"), key=lambda v: (v.batch, v.loop))
    for i, ((batch, loop), group) in enumerate(itertools.groupby(timed, key=lambda v: (v.batch, v.loop))):
        levels = sorted(group, key=lambda v: v.images_per_second or 0.0)
        colour, marker = style(i)
        for name, line in (("p50_ms", "-"), ("p90_ms", "--"), ("p99_ms", ":")):
            known = [(v.images_per_second, getattr(v, name)) for v in levels if getattr(v, name) is not None]
            label = f"batch {batch}, {loop}" if name == "p50_ms" else None
            axes.plot([x for x, _ in known], [y for _, y in known], line, color=colour, marker=marker, label=label,
                      markersize=4)  # fmt: skip
    detail = "line p50, dashes p90, dots p99"
    if result.budget_ms is not None:
        axes.axhline(result.budget_ms, color=DIM, linestyle="--", linewidth=1)
        detail += f"; budget {result.budget_ms:g} ms"
    axes.set(xlabel="images per second", ylabel="ms")
    caption(axes, "latency", detail)
    if timed:
        axes.set_yscale("log")
        log_ticks(axes.yaxis, axes.get_ylim())
    frame(axes)
    legend(figure, axes)
    return to_png(figure)
