"""Parts that the plots of this package share: colours, tick labels that do not overlap, the legend, the PNG."""

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from vtk.marks import SOFTWARE
from vtk.text import in_plot

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito: safe for colour blindness."""

MARKERS = "osD^vPX*"
DIM = "#444444"
_POINTS, _CHARACTER = 72, 0.6
"""Points an inch; width of a character as a fraction of the font size."""


def style(i: int) -> tuple[str, str]:
    """Return colour and marker of curve ``i``; the pair repeats only after 64 curves."""
    return COLOURS[i % len(COLOURS)], MARKERS[(i + i // len(COLOURS)) % len(MARKERS)]


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of this size in inches, at the resolution of every plot here."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130)
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
    FigureCanvasAgg(figure)
    return figure


def to_png(figure: Any) -> bytes:
    """Return the figure as PNG, marked as written by vtk."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata=SOFTWARE)
    return buffer.getvalue()


def frame(axes: Any, *, along: str = "both") -> None:
    """Draw a light grid below the data, and only the left and the lower line of the frame."""
    axes.grid(True, axis=along, which="major", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def caption(axes: Any, title: str, detail: str = "") -> None:
    """Put the title to the left above a panel, and how to read it in small letters to the right."""
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.set_title(detail, loc="right", fontsize=8, color=DIM)


def heading(figure: Any, lines: Sequence[str]) -> None:
    """Put text over all panels, wrapped to the figure's width; what comes from outside may hold any character."""
    room = characters(figure.get_figwidth() - 0.2, 10)
    figure.suptitle("\n".join(in_plot(part) for line in lines for part in textwrap.wrap(line, room)), fontsize=10)


def legend(figure: Any, axes: Any, *, fontsize: float = 9) -> None:
    """Put the legend of ``axes`` below all panels, in as many columns as the figure has room for."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        key = 5 * fontsize / _POINTS  # line, marker and gaps
        column = key + max(len(label) for label in labels) * _CHARACTER * fontsize / _POINTS
        columns = max(1, min(len(labels), int((figure.get_figwidth() - 0.3) / column)))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=fontsize)


def characters(width: float, fontsize: float) -> int:
    """Return how many characters fit ``width`` inches."""
    return max(8, int(width * _POINTS / (_CHARACTER * fontsize)))


def room(axes: Any) -> float:
    """Return the width of a panel in points, about: before the layout, without the labels beside it."""
    spec = axes.get_subplotspec()
    share = len(spec.colspan) / spec.get_gridspec().ncols
    return float(share * axes.figure.get_figwidth() * _POINTS - 65)


def labelled(
    values: Sequence[float], numbers: Sequence[int], width: float, *, fontsize: float = 10, pad: float = 6
) -> list[int]:
    """Return the indices of those values on a logarithmic axis whose numbers do not overlap.

    The ends come first, then powers of two, then the others from the left.

    Args:
        values: ascending, > 0.
        numbers: what is written at each.
        width: from the first value to the last, in points.
        fontsize: of the labels, in points.
        pad: least gap between two labels, in points.
    """
    low, high = math.log(values[0]), math.log(values[-1])
    at = [width * (math.log(v) - low) / ((high - low) or 1) for v in values]
    half = [len(str(n)) * _CHARACTER * fontsize / 2 for n in numbers]
    ends = (0, len(values) - 1)
    order = sorted(range(len(values)), key=lambda i: (i not in ends, numbers[i] & (numbers[i] - 1) != 0, i))
    kept: list[int] = []
    for i in order:
        if all(abs(at[i] - at[k]) >= half[i] + half[k] + pad for k in kept):
            kept.append(i)
    return sorted(kept)


def log_ticks(axis: Any, limits: tuple[float, float]) -> None:
    """Label a logarithmic axis with plain numbers."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(FuncFormatter(between(limits)))


def between(limits: tuple[float, float]) -> Callable[[float, int], str]:
    """Label 2 and 5 of each decade, 3 alone where there are many decades, and more where there is less than one."""
    span = limits[1] / limits[0]
    digits = (
        "123456789" if span <= 4 else "23457" if span <= 10 else "25" if span <= 200 else "3" if span <= 1e5 else ""
    )

    def label(value: float, _: int) -> str:
        return f"{value:g}" if f"{value:e}"[0] in digits else ""

    return label
