"""Profiles a timm model at several image sizes: a report for each, and one page over all."""

import base64
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Unpack

from vtk import console
from vtk.errors import UsageError
from vtk.files import write_text
from vtk.filesets import open_folder, replace_set
from vtk.formats import write_json
from vtk.html import document, table
from vtk.marks import Recognise, json_with
from vtk.marks import page as page_mark
from vtk.options import expect
from vtk.packages import require
from vtk.profiling.config import ProfileConfig
from vtk.profiling.figures import caption, frame, legend, new_figure, style, to_png
from vtk.profiling.profile import profile
from vtk.profiling.report import MARKS, put_reports
from vtk.profiling.result import ProfileResult
from vtk.profiling.rows import DASH, ms, rate
from vtk.runtime.source import Opening


def profile_sizes(
    source: str | Path,
    config: ProfileConfig,
    *,
    command: str = "",
    show_progress: bool = True,
    **opening: Unpack[Opening],
) -> list[ProfileResult]:
    """Measure a timm model at each of ``config.img_sizes``.

    With ``config.out`` every size has a report in ``OUT/img-SIZE``, and ``OUT/sizes.html`` and ``OUT/sizes.json`` hold
    what depends on the size.

    Args:
        source: name of the model.
        config: with `img_sizes`, ascending or not.
        command: kept in the reports.
        show_progress: a bar on a terminal.
        opening: how to open the model, see `vtk.open_source`.

    Raises:
        UsageError: no sizes, or a size that the model cannot have.
        DataError: ``out`` is not empty.
    """
    expect(config, ProfileConfig, "profile_sizes")
    if not config.img_sizes:
        raise UsageError("`img_sizes` is empty; give sizes in pixels, or use `profile`")
    if config.out is None:
        return _measure(source, config, command, show_progress, opening)
    require("matplotlib")
    marks = _marks(config.out, config.img_sizes)
    with open_folder(config.out, marks, command or "vtk profile", overwrite=config.overwrite):
        results = _measure(source, config, command, show_progress, opening)
        with replace_set(config.out, marks, "vtk profile") as staged:
            for result in results:
                (folder := staged / f"img-{result.input_shape[1]}").mkdir()
                put_reports(result, folder)
            write_json(staged / "sizes.json", {"results": [r.to_dict() for r in results]})
            write_text(staged / "sizes.html", sizes_page(results))
    return results


def _marks(out: Path, sizes: Sequence[int]) -> dict[str, Recognise]:
    """Return the files of a report over these sizes and, in ``out``, of an earlier one over others."""
    there = [path.name for path in out.glob("img-*") if path.name[4:].isdecimal()] if out.is_dir() else []
    folders = sorted({*(f"img-{size}" for size in sizes), *there})
    marks = {f"{folder}/{name}": mark for folder in folders for name, mark in MARKS.items()}
    return {**marks, "sizes.json": json_with("results"), "sizes.html": page_mark()}


def _measure(
    source: str | Path, config: ProfileConfig, command: str, show_progress: bool, opening: Opening
) -> list[ProfileResult]:
    results: list[ProfileResult] = []
    for size in sorted(config.img_sizes):
        console.say(f"image size {size}")
        # ceilings are the device's: once is enough
        one = replace(config, img_sizes=(), out=None, ceilings=config.ceilings and not results)
        try:
            opening["img_size"] = size
            found = profile(source, one, command=command, show_progress=show_progress, **opening)
            results.append(found)
        except KeyboardInterrupt:
            if not results:
                raise
            results[-1] = replace(results[-1], stopped=True)
        if results[-1].stopped:
            break
    return results


def print_sizes(results: Sequence[ProfileResult]) -> None:
    """Print a table of every size, back-end and batch."""
    console.table("by image size", _COLUMNS, _rows(results), left=(1,))


def sizes_page(results: Sequence[ProfileResult]) -> str:
    """Return one page with a plot and a table over all sizes."""
    picture = base64.b64encode(sizes_png(results)).decode("ascii")
    rows = ["".join(f"<td>{escape(text)}</td>" for text in row) for row in _rows(results)]
    source = results[0].source
    links = "".join(f'<li><a href="img-{r.input_shape[1]}/report.html">{r.input_shape[1]} px</a></li>' for r in results)
    body = (
        f"<h1>Latency by image size</h1><p>{escape(source)} · {escape(results[0].device_name)}</p>"
        f'<img alt="Milliseconds an image against image size" src="data:image/png;base64,{picture}">'
        f"<h2>Every size</h2>{table(list(_COLUMNS), rows)}<h2>Reports</h2><ul>{links}</ul>"
    )
    return document(f"{source}: latency by image size", body)


def sizes_png(results: Sequence[ProfileResult]) -> bytes:
    """Draw milliseconds an image against the image's side, at the batch with the most images per second."""
    figure = new_figure(5.4, 4.0)
    axes = figure.subplots()
    names = list(dict.fromkeys(b.name for r in results for b in r.backends))
    for i, name in enumerate(names):
        points = [(r.input_shape[1], best) for r in results if (best := _best(r, name)) is not None]
        colour, marker = style(i)
        if points:
            axes.plot([x for x, _ in points], [1000 / y for _, y in points], color=colour, marker=marker, label=name)
    axes.set(xlabel="image size (pixels)", ylabel="ms per image")
    caption(axes, "latency", "at the batch size with most images/s")
    axes.set_ylim(bottom=0)
    frame(axes)
    legend(figure, axes)
    return to_png(figure)


_COLUMNS = ("size", "backend", "batch", "p50 ms", "p90 ms", "images/s")


def _rows(results: Sequence[ProfileResult]) -> list[list[str]]:
    return [
        [str(r.input_shape[1]), backend.name, str(cell.batch), ms(cell.p50_ms) if cell.status == "ok" else cell.status,
         ms(cell.p90_ms), rate(cell.images_per_second) if cell.status == "ok" else DASH]
        for r in results for backend, cell in r.cells()
    ]  # fmt: skip


def _best(result: ProfileResult, name: str) -> float | None:
    rates = [c.images_per_second for b, c in result.cells() if b.name == name and c.images_per_second]
    return max(rates, default=None)
