"""How the diagnostics' plots look: one size, one set of colours, depth along the x axis with its blocks shaded."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from vtk.files import replace_file

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito: safe for colour blindness. The first model has the first, the second the second."""

Unit = Literal["msa", "mlp", "conv", "subsampling", "other"]
_SHADES: dict[str, str] = {"msa": "#0072B2", "mlp": "#E69F00", "conv": "#009E73", "subsampling": "#777777"}
_TITLES = {"msa": "MSA", "mlp": "MLP", "conv": "Conv", "subsampling": "subsampling"}


def new(columns: int = 1, rows: int = 1, *, width: float = 6.4, height: float = 3.6) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, row by row; ``width`` and ``height`` are inches of one of them.

    One column reads well on a phone; more are for pictures in a row.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * width, rows * height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot: it would choose a back-end with windows, and keep every figure
    return figure, list(figure.subplots(rows, columns, squeeze=False).ravel())


def finish(axes: Any, *, x: str, y: str, title: str = "", legend: bool = False) -> None:
    """Give axes their labels with units, a light grid and, if asked, a legend."""
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize=11)
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize=9)


def depth(count: int) -> list[float]:
    """Return the normalised depth of ``count`` points, from 0 to 1."""
    return [i / max(count - 1, 1) for i in range(count)]


def shade(axes: Any, kinds: Sequence[Unit]) -> None:
    """Shade the way to each point of normalised depth by the kind of unit that led there, with a legend of its own.

    Args:
        axes: whose x axis is normalised depth.
        kinds: of every point, the first included (its own is not drawn: nothing leads there).
    """
    from matplotlib.patches import Patch

    at = depth(len(kinds))
    for left, right, kind in zip(at, at[1:], kinds[1:], strict=False):
        if kind in _SHADES:
            axes.axvspan(left, right, color=_SHADES[kind], alpha=0.12, linewidth=0)
    handles = [Patch(color=_SHADES[k], alpha=0.3, label=_TITLES[k]) for k in _SHADES if k in kinds[1:]]
    if handles:
        first = axes.get_legend()
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=4, frameon=False, fontsize=8)
        if first is not None:
            axes.add_artist(first)


def png(figure: Any) -> bytes:
    """Return a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def save(figure: Any, path: Path) -> None:
    """Write a figure as ``path.png`` and ``path.svg``, each whole or not at all; images in an SVG stay pixels."""
    for kind in ("png", "svg"):
        with replace_file(path.with_name(f"{path.name}.{kind}")) as tmp:
            figure.savefig(tmp, format=kind, metadata={"Date": None} if kind == "svg" else None)
