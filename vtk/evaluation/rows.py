"""Writes the table of classes as CSV."""

import csv
import io
import math

from vtk.evaluation.metrics import Metrics
from vtk.evaluation.multilabel import MultiLabelMetrics

_COLUMNS = ("precision", "recall", "f1", "average_precision")


PER_CLASS = ",".join(("class", "count", *_COLUMNS[:3]))
"""First line of every table of `per_class_csv`, or its beginning."""


def per_class_csv(metrics: Metrics | MultiLabelMetrics) -> str:
    """Return a line per class; undefined values, as for a class that is never predicted, are empty cells."""
    columns = _COLUMNS[:3] if isinstance(metrics, Metrics) else _COLUMNS
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["class", "count", *columns])
    for row in metrics.per_class():
        scores = [getattr(row, name) for name in columns]
        writer.writerow([row.name, row.count, *("" if math.isnan(score) else score for score in scores)])
    return text.getvalue()
