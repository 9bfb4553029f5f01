"""HTML report: suggested changes first, then key numbers and a section with plots for each diagnostic."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vtk import console
from vtk.analysis.diagnostics import GROUPS, diagnostic
from vtk.analysis.figures import WIDTH_PIXELS
from vtk.analysis.report import summary
from vtk.analysis.report.page_style import STYLE
from vtk.analysis.report.plot_files import embed
from vtk.analysis.result_files import Analysis
from vtk.html import document, text

Pictures = Mapping[str, Sequence[tuple[str, str, bytes]]]
"""Name, caption and PNG of each plot, by diagnostic, as `vtk.analysis.run.draw` returns them."""

_ON_TOP = ("model", "source", "data", "images", "input", "protocol")
_DETAILS = ("options", "protocol settings")  # of each diagnostic; in analysis.json
_LONG_WORD = 30  # letters that fit into a line on a phone
_WIDE = 1.3  # widths of a plot; a wider figure gets the whole row, and scrolls sideways on a phone


def page(analyses: Sequence[Analysis], pictures: Pictures) -> str:
    """Return the report of one model, or of two side by side, as self-contained HTML.

    External texts are escaped; there are no scripts, and nothing is downloaded.

    Args:
        analyses: one, or two that are compared.
        pictures: plots by diagnostic.
    """
    title = " compared with ".join(one.label for one in analyses)
    parts = [f"<h1>Analysis of {text(title)}</h1>", _top(analyses)]
    parts += [f'<p class="warning">{prose(caution)}</p>' for caution in summary.cautions(analyses)]
    parts += [_change(analyses), _headline(analyses), _contents(analyses)]
    have = summary.diagnostics_of(analyses)
    for group, names in GROUPS.items():
        if any(name in have for name in names):
            parts.append(f'<h2 id="{group}">{group.capitalize()}</h2>')
            parts += [_section(analyses, name, pictures.get(name, ())) for name in names if name in have]
    parts += [_absent(analyses), _made(analyses)]
    return document(f"Analysis of {title}", "\n".join(part for part in parts if part), style=STYLE)


def prose(sentence: str) -> str:
    """Escape a sentence; text in backticks is shown as code."""
    return re.sub(r"`([^`]+)`", lambda match: f"<code>{_whole_words(match[1])}</code>", text(sentence))


def _whole_words(code: str) -> str:
    """Keep options in one piece: a browser breaks lines after hyphens."""
    words = (f"<span>{word}</span>" if "-" in word and len(word) < _LONG_WORD else word for word in code.split(" "))
    return " ".join(words)


def _top(analyses: Sequence[Analysis]) -> str:
    items = []
    for i, one in enumerate(analyses):
        facts = [f"{key}: {one.facts[key]}" for key in _ON_TOP if one.facts.get(key) not in (None, "", one.label)]
        name = f"<b>{text(one.label)}</b> " if len(analyses) > 1 else ""
        items.append(f'<li>{_letter(analyses, i)}{name}<span class="dim">{text(" · ".join(facts))}</span></li>')
    return f'<ul class="key">{"".join(items)}</ul>'


def _letter(analyses: Sequence[Analysis], i: int) -> str:
    """Return the letter of a model in the colour of its lines; empty if there is only one."""
    return f'<span class="{"ab"[i]}">{summary.LETTERS[i]}</span> ' if len(analyses) > 1 else ""


def _change(analyses: Sequence[Analysis]) -> str:
    parts = []
    for i, one in enumerate(analyses):
        items = "".join(
            f'<li><a href="#{name}">{text(diagnostic(name).title)}</a>: {prose(why)}</li>'
            for name, why in summary.advice(one).items()
        )
        nothing = (
            ("No reading suggests a change.") if one.results else "Nothing could be measured; the reasons are below."
        )
        head = f"<h3>{_letter(analyses, i)}{text(one.label)}</h3>" if len(analyses) > 1 else ""
        parts.append(head + (f"<ul>{items}</ul>" if items else f"<p>{nothing}</p>"))
    return f'<h2 id="change">Suggested changes</h2><div class="change">{"".join(parts)}</div>'


def _headline(analyses: Sequence[Analysis]) -> str:
    if not summary.diagnostics_of(analyses):
        return ""
    bodies = []
    for name, numbers in summary.headline(analyses).items():
        span = 2 if len(analyses) == 1 else 4
        head = (
            f'<tr><th scope="rowgroup" colspan="{span}"><a href="#{name}">{text(diagnostic(name).title)}</a></th></tr>'
        )
        rows = "".join(_row(number, values) for number, values in numbers.items())
        bodies.append(f"<tbody>{head}{rows}</tbody>" if rows else "")
    only = []
    for i in range(len(analyses) if len(analyses) > 1 else 0):
        every = summary.diagnostics_of(analyses)
        names = [name for name in every if [j for j, _ in summary.absences(analyses, name)] == [1 - i]]
        links = ", ".join(f'<a href="#{name}">{text(diagnostic(name).title)}</a>' for name in names)
        if names:
            only.append(f"<p>Only {summary.LETTERS[i]} has: {links}.</p>")
    return f'<h2 id="numbers">Key numbers</h2>{_numbers(analyses, "".join(bodies))}{"".join(only)}'


def _numbers(analyses: Sequence[Analysis], body: str, *, short: bool = False) -> str:
    names = [*(_letter(analyses, i) for i in range(len(analyses))), "B − A"] if len(analyses) > 1 else ["value"]
    cells = "".join(f'<th scope="col">{name}</th>' for name in ("", *names))
    top = "" if short and len(analyses) == 1 else f"<thead><tr>{cells}</tr></thead>"
    return f'<div class="scroll"><table class="numbers">{top}{body}</table></div>'


def _row(name: str, values: Sequence[float | None]) -> str:
    cells = [summary.number_text(value) for value in values]
    if len(values) > 1:
        cells.append(summary.number_text(summary.difference(values), sign=True))
    return f"<tr><td>{text(name)}</td>{''.join(f'<td class=n>{cell}</td>' for cell in cells)}</tr>"


def _contents(analyses: Sequence[Analysis]) -> str:
    have = summary.diagnostics_of(analyses)
    lines = []
    for group, names in GROUPS.items():
        links = [f'<a href="#{name}">{text(diagnostic(name).title)}</a>' for name in names if name in have]
        if links:
            lines.append(f"<li><b>{group.capitalize()}</b><br>{' '.join(links)}</li>")
    last = '<a href="#absent">Not measured</a> ' if summary.refusals(analyses) else ""
    lines.append(f'<li>{last}<a href="#made">Run details</a></li>')
    return f'<nav aria-label="Contents"><h2>Contents</h2><ul>{"".join(lines)}</ul></nav>'


def _section(analyses: Sequence[Analysis], name: str, drawn: Sequence[tuple[str, str, bytes]]) -> str:
    one = diagnostic(name)
    having = [analysis for analysis in analyses if name in analysis.results]
    labels = " and ".join(analysis.label for analysis in having)
    parts = [f"<h3>{text(one.title)}</h3>", f'<p class="dim small">{text(one.source)}</p><p>{prose(one.explains)}</p>']
    if drawn:
        alt = f"{one.title} of {labels}; the caption below explains the plot"
        parts.append(f'<div class="plots">{"".join(_figure(alt, caption, png) for _, caption, png in drawn)}</div>')
    for i, analysis in enumerate(analyses):
        if name not in analysis.results:
            continue
        head = f"{_letter(analyses, i)}{text(analysis.label)}" if len(analyses) > 1 else "Reading"
        sentences = " ".join(prose(sentence) for sentence in one.read(analysis.results[name]))
        parts.append(f"<h4>{head}</h4><p>{sentences}</p>")
    parts += [
        f'<p class="dim">{_letter(analyses, i)}has no result: {prose(why)}</p>'
        for i, why in summary.absences(analyses, name)
    ]
    rows = "".join(_row(number, values) for number, values in summary.headline(analyses)[name].items())
    if rows:
        parts.append(_numbers(analyses, f"<tbody>{rows}</tbody>", short=True))
    return f'<section class="one" id="{name}">{"".join(parts)}</section>'


def _figure(alt: str, caption: str, png: bytes) -> str:
    address, width, height = embed(png)
    plots = width / WIDTH_PIXELS
    # a plot is 360 px wide on a phone; a figure with several columns is that wide per column
    style = f' style="--least:{math.ceil(20 * plots)}rem"' if plots > _WIDE else ""
    image = f'<img alt="{text(alt)}" width="{width}" height="{height}"{style} src="{address}">'
    kind = ' class="wide"' if plots > _WIDE else ""
    return f'<figure{kind}><div class="scroll">{image}</div><figcaption>{prose(caption)}</figcaption></figure>'


def _absent(analyses: Sequence[Analysis]) -> str:
    rows = []
    for name in summary.refusals(analyses):
        for i, one in enumerate(analyses):
            if name in one.refused:
                letter = f"<td>{_letter(analyses, i)}</td>" if len(analyses) > 1 else ""
                rows.append(f"<tr><td>{text(name)}</td>{letter}<td>{prose(one.refused[name])}</td></tr>")
    if not rows:
        return ""
    names = ("diagnostic", "model", "reason") if len(analyses) > 1 else ("diagnostic", "reason")
    top = "".join(f"<th>{name}</th>" for name in names)
    table = f'<table class="reasons"><thead><tr>{top}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return f'<h2 id="absent">Not measured</h2><div class="scroll">{table}</div>'


def _made(analyses: Sequence[Analysis]) -> str:
    parts = []
    for i, one in enumerate(analyses):
        facts: dict[str, Any] = {key: value for key, value in one.facts.items() if key not in _DETAILS}
        facts["seconds"] = f"{sum(one.seconds.values()):.1f}"
        facts["peak memory"] = console.size(one.peak_memory_bytes)
        rows = "".join(
            f"<dt class=dim>{text(key)}</dt><dd>{text(_fact(value))}</dd>" for key, value in facts.items() if value
        )
        head = f"<h3>{_letter(analyses, i)}{text(one.label)}</h3>" if len(analyses) > 1 else ""
        parts.append(f'{head}<dl class="facts">{rows}</dl>')
    times = "".join(
        _row(name, [one.seconds.get(name) for one in analyses]) for name in summary.diagnostics_of(analyses)
    )
    if times:
        parts.append(f"<h3>Seconds</h3>{_numbers(analyses, f'<tbody>{times}</tbody>', short=True)}")
    where = "analysis.json" if len(analyses) == 1 else "each model's analysis.json"
    parts.append(f'<p class="dim small">All values are in {where}; the plots are in figures/ as PNG and SVG.</p>')
    return f'<h2 id="made">Run details</h2>{"".join(parts)}'


def _fact(value: Any) -> str:
    return "; ".join(f"{key}: {one}" for key, one in value.items()) if isinstance(value, dict) else str(value)
