"""Files of an evaluation: the table of classes as CSV, the confusion matrix and the learning curves as PNG."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vtk import files
from vtk.errors import UsageError
from vtk.evaluation.abstained import Abstained
from vtk.evaluation.labels import UNKNOWN
from vtk.evaluation.metrics import Metrics
from vtk.evaluation.multilabel import MultiLabelMetrics
from vtk.marks import SOFTWARE
from vtk.text import in_plot, printable

_NUMBERS_UP_TO = 20
_NAMES_UP_TO = 50
_SHARES = ("top1", "top5", "f1", "mAP", "balanced_accuracy")
_COLOURS = ("#1f5fa8", "#d1662b", "#3a8f5c", "#8a4fa3", "#777777")
_COLUMNS = ("precision", "recall", "f1", "average_precision")

PER_CLASS = ",".join(("class", "count", *_COLUMNS[:3]))
"""First line of every table of `per_class_csv`, or its beginning."""


def per_class_csv(metrics: Metrics | MultiLabelMetrics, abstained: Abstained | None = None) -> str:
    """Return a line per class; undefined values, as for a class that is never predicted, are empty cells.

    With a threshold the last column, ``unknown``, counts the images of the class whose score is below it.
    """
    columns = _COLUMNS[:3] if isinstance(metrics, Metrics) else _COLUMNS
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    more = [] if abstained is None else [[int(n)] for n in abstained.unknown]
    writer.writerow(["class", "count", *columns, *(["unknown"] if more else [])])
    per_class: list[Any] = list(metrics.per_class())
    for i, row in enumerate(per_class):
        scores = [getattr(row, name) for name in columns]
        last = more[i] if more else []
        writer.writerow([row.name, row.count, *("" if math.isnan(score) else score for score in scores), *last])
    return text.getvalue()


def confusion_png(metrics: Metrics, path: Path, abstained: Abstained | None = None) -> None:
    """Draw the confusion matrix, each row as percent of the class's images; with a threshold one more column, unknown.

    Cells show numbers up to 20 classes, axes show names up to 50 and class indices above.

    Raises:
        DataError: the file cannot be written.
    """
    n = len(metrics.classes)
    table = metrics.confusion if abstained is None else abstained.confusion
    share = 100 * table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    side = min(max(0.42 * n, 3.0), 12.0)
    font = min(9.0, 72 * side / n * 0.62) if n <= _NAMES_UP_TO else 9.0  # a row of text fits a row of cells
    fig = _figure(side + 2.4, side + 1.9)
    axes = fig.add_subplot()
    picture = axes.imshow(share, cmap="Blues", vmin=0, vmax=100, interpolation="nearest")
    if n <= _NAMES_UP_TO:
        names = [_short(name) for name in metrics.classes]
        said = names if abstained is None else [*names, UNKNOWN]
        axes.set_xticks(range(len(said)), said, rotation=90 if n > 3 else 0, fontsize=font)
        axes.set_yticks(range(n), names, fontsize=font)
    if n <= _NUMBERS_UP_TO:
        for t, p in zip(*np.nonzero(table), strict=True):
            colour = "white" if share[t, p] > 55 else "black"
            axes.text(p, t, f"{share[t, p]:.0f}", ha="center", va="center", color=colour, fontsize=font)
    axes.set_xlabel("predicted" if n <= _NAMES_UP_TO else "predicted (class index)")
    axes.set_ylabel("true" if n <= _NAMES_UP_TO else "true (class index)")
    title = f"top-1 {100 * metrics.top1:.1f} % of {metrics.count} images"
    if abstained is not None:
        axes.axvline(n - 0.5, color="#777777", linewidth=1)
        error = "" if abstained.error is None else f", {100 * abstained.error:.1f} % of them wrong"
        title = f"{100 * abstained.coverage:.1f} % of {metrics.count} images answered{error}"
    axes.set_title(title, fontsize=11)
    bar = fig.colorbar(picture, ax=axes, fraction=0.046, pad=0.03)
    bar.set_label("% of the true class", fontsize=9)
    _save(fig, path)


def curves_png(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the learning curves of a run, from one row per epoch.

    Columns with ``loss`` in their name share the first panel, accuracies, F1 and mAP the second (as percent), ``lr``
    the third; a panel without columns is left out. The x axis is ``epoch``, or the row's number without it.

    Raises:
        UsageError: no row, or none of these columns.
        DataError: the file cannot be written.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    panels = [
        ("loss", [key for key in keys if "loss" in key], 1.0),
        ("accuracy, %", [key for key in keys if any(name in key for name in _SHARES) and not _idle(key, rows)], 100.0),
        ("learning rate", [key for key in keys if key == "lr" or key.startswith("lr_")], 1.0),
    ]
    panels = [panel for panel in panels if panel[1]]
    if not panels:
        raise UsageError(f"no learning curves to draw in {len(rows)} rows with columns {', '.join(keys) or '–'}")
    fig = _figure(4.6 * len(panels), 3.4)
    for i, (title, columns, scale) in enumerate(panels):
        axes = fig.add_subplot(1, len(panels), i + 1)
        for colour, column in zip(_COLOURS, columns, strict=False):
            points = [
                (row.get("epoch", number + 1), scale * float(row[column]))
                for number, row in enumerate(rows)
                if row.get(column) is not None
            ]
            x, y = [point[0] for point in points], [point[1] for point in points]
            axes.plot(x, y, color=colour, label=column, marker="o" if len(points) <= 30 else "", markersize=3.5)
        if scale == 100.0 and axes.get_ylim()[1] > 101:
            axes.set_ylim(top=101)  # no scale above 100 %
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        if len(rows) == 1:
            axes.margins(x=1)
            axes.set_xticks([rows[0].get("epoch", 1)])
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(columns) > 1:
            axes.legend(frameon=False, fontsize=9)
    _save(fig, path)


def _idle(key: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a column is the top-5 of up to five classes, which is always 1."""
    return "top5" in key and all(row.get(key) == 1 for row in rows)


def _figure(width: float, height: float) -> Any:
    # not pyplot: it would choose a back-end with windows, and keep every figure
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def _save(figure: Any, path: Path) -> None:
    with files.replace_file(path) as tmp:
        figure.savefig(tmp, format="png", metadata=SOFTWARE, bbox_inches="tight")  # the layout cuts names off


def _short(name: str, limit: int = 18) -> str:
    name = printable(name)
    return in_plot(name if len(name) <= limit else name[: limit - 1] + "…")
