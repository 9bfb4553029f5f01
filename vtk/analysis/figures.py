"""Style of the plots: one size, one set of colours, depth along the x axis with its blocks shaded."""

import contextlib
import io
import math
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from vtk.files import replace_file
from vtk.marks import SOFTWARE
from vtk.text import in_plot, one_line

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito, for colour-blind readers; the first two are those of the first and the second model."""

WIDTH, HEIGHT = 5.0, 3.2
"""Inches of one plot. On a phone it is 340 px wide, and text of 10 points is 9 px high."""

WIDTH_PIXELS = 900
"""Width of one plot in a PNG, also sharp on a phone."""

Unit = Literal["msa", "mlp", "conv", "subsampling", "other"]
_SHADES: dict[str, str] = {"msa": "#0072B2", "mlp": "#E69F00", "conv": "#009E73", "subsampling": "#777777"}
_TITLES = {"msa": "MSA", "mlp": "MLP", "conv": "Conv", "subsampling": "subsampling"}
_DPI = WIDTH_PIXELS / WIDTH
_LONGEST = 26
_LEGEND_ROOM = 66  # maximum number of letters of a legend inside the axes
_LEGEND_LINE = 0.19  # inches of a row of letters of size 9
_SALT = "vtk"  # for the ids in an SVG, so that the same plot is the same file


def new(columns: int = 1, rows: int = 1, *, width: float = WIDTH, height: float = HEIGHT) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, row by row; ``width`` and ``height`` are inches of one of them.

    One column reads well on a phone; more columns are for rows of images, which scroll sideways there.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * width, rows * height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot: it would choose a back-end with windows, and keep every figure
    return figure, list(figure.subplots(rows, columns, squeeze=False).ravel())


def finish(axes: Any, *, x: str, y: str, title: str = "", legend: bool = False) -> None:
    """Give axes their labels with units, a light grid and, if asked, a legend.

    A legend that would hide much of the only axes of a figure is placed below them.
    """
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize=11)
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if not legend:
        return
    handles, labels = axes.get_legend_handles_labels()
    if len(axes.figure.axes) == 1 and sum(len(text) + 6 for text in labels) > _LEGEND_ROOM:
        _below(axes.figure, dict(zip(labels, handles, strict=True)))
    else:
        axes.legend(frameon=True, framealpha=0.7, edgecolor="none", fontsize=9)


def finish_by_layer(axes: Any, *, x: str, y: str, legend: bool) -> None:
    """`finish` axes whose x is the number of a block or layer and whose y cannot be negative."""
    finish(axes, x=x, y=y, legend=legend)
    from_zero(axes)
    axes.xaxis.get_major_locator().set_params(integer=True)


def from_zero(axes: Any) -> None:
    """Start the y axis at 0 and end it above the highest value, for values that cannot be negative."""
    top = float(axes.dataLim.y1)
    axes.set_ylim(0, 1.05 * top if 0 < top < float("inf") else 1)


def depth(count: int) -> list[float]:
    """Return the normalised depth of ``count`` points, from 0 to 1."""
    return [i / max(count - 1, 1) for i in range(count)]


def shade(axes: Any, kinds: Sequence[Unit]) -> None:
    """Shade the interval before each point of normalised depth by the kind of its unit, with a legend below.

    Args:
        axes: whose x axis is normalised depth.
        kinds: of every point; that of the first is not drawn.
    """
    from matplotlib.patches import Patch

    at = depth(len(kinds))
    for left, right, kind in zip(at, at[1:], kinds[1:], strict=False):
        if kind in _SHADES:
            axes.axvspan(left, right, color=_SHADES[kind], alpha=0.12, linewidth=0)
    handles = {_TITLES[k]: Patch(color=_SHADES[k], alpha=0.3, linewidth=0) for k in _SHADES if k in kinds[1:]}
    if handles:
        _below(axes.figure, handles)


def label(text: str) -> str:
    """Return an external name for a plot: at most 26 letters, not parsed as a formula."""
    shown = one_line(text)
    if len(shown) > _LONGEST:  # names of models differ at their ends
        shown = f"{shown[: _LONGEST - 13]}…{shown[-12:]}"
    return in_plot(shown)


def png(figure: Any) -> bytes:
    """Return a figure as PNG."""
    buffer = io.BytesIO()
    with _settled(figure):
        figure.savefig(buffer, format="png", metadata=SOFTWARE)
    return buffer.getvalue()


def save(figure: Any, path: Path) -> bytes:
    """Write a figure as ``path.png`` and ``path.svg``, each whole or not at all, reproducibly.

    Images and heat maps stay pixels in the SVG; otherwise each cell would be a shape.

    Returns:
        The PNG.
    """
    pixels = png(figure)
    with replace_file(path.with_name(f"{path.name}.png")) as tmp:
        tmp.write_bytes(pixels)
    with replace_file(path.with_name(f"{path.name}.svg")) as tmp, _settled(figure):
        figure.savefig(tmp, format="svg", metadata={"Date": None, "Creator": "vtk"})
    return pixels


@contextlib.contextmanager
def _settled(figure: Any) -> Iterator[None]:
    from matplotlib import rc_context
    from matplotlib.collections import QuadMesh

    for mesh in figure.findobj(QuadMesh):
        mesh.set_rasterized(True)
    with rc_context({"svg.hashsalt": _SALT}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a class's name may be in any script
        yield


def _below(figure: Any, handles: dict[str, Any]) -> None:
    """Add entries, by label, to the legend below the axes; the figure grows, and the axes keep their size."""
    height = figure.get_figheight()
    for old in figure.legends:
        known = dict(zip((text.get_text() for text in old.get_texts()), old.legend_handles, strict=True))
        handles = {**known, **handles}
        height -= _rows(figure, known) * _LEGEND_LINE
    figure.legends.clear()
    rows = _rows(figure, handles)
    figure.set_figheight(height + rows * _LEGEND_LINE)
    names = list(handles)
    figure.legend(
        list(handles.values()), names, loc="outside lower center", ncols=math.ceil(len(names) / rows), frameon=False,
        fontsize=9, borderpad=0.1, handlelength=1.8, columnspacing=1.2,
    )  # fmt: skip


def _rows(figure: Any, labels: Collection[str]) -> int:
    letters = max(len(text) for text in labels)
    fitting = int(figure.get_figwidth() * 72 / (letters * 5 + 36))  # points: a letter of size 9, a handle
    return math.ceil(len(labels) / max(fitting, 1))
