"""The report: one page with its plots inside."""

import base64
from collections.abc import Mapping, Sequence
from html import escape

from vtk.analysis.diagnostics import diagnostic
from vtk.analysis.run import Analysis

Pictures = Mapping[str, Sequence[tuple[str, str, bytes]]]


def page(analyses: Sequence[Analysis], pictures: Pictures) -> str:
    """Return the report of one model, or of two side by side, as HTML that needs nothing beside it."""
    parts = [f"<h1>{escape(' and '.join(one.label for one in analyses))}</h1>"]
    for name, drawn in pictures.items():
        one = diagnostic(name)
        parts.append(f"<h2>{escape(one.title)}</h2><p>{escape(one.explains)}</p>")
        for _, caption, png in drawn:
            data = base64.b64encode(png).decode("ascii")
            parts.append(f'<figure><img alt="{escape(caption)}" src="data:image/png;base64,{data}"></figure>')
        for analysis in analyses:
            sentences = " ".join(one.read(analysis.results[name]))
            parts.append(f"<p><b>{escape(analysis.label)}</b>: {escape(sentences)}</p>")
    return f'<!doctype html><html lang="en"><head><meta charset="utf-8"></head><body>{"".join(parts)}</body></html>\n'
