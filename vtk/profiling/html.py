"""A report of one file: the plot is inside, nothing is fetched, and it can be read on a phone."""

import base64
from html import escape

from vtk.profiling.report import columns, heading, notes, values, work_columns, work_values
from vtk.profiling.report import title as title_of
from vtk.profiling.result import BackendResult, ProfileResult

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --dim: #5f6368; --line: #dadce0; --bad: #b3261e; --bg: #ffffff }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --dim: #a6abb1; --line: #3c4043; --bad: #f2b8b5; --bg: #17181a }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--bg); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.3rem; overflow-wrap: anywhere } h2 { font-size: 1.05rem; margin: 1.6rem 0 .3rem }
.budget { border-left: 4px solid #0072b2; padding: .4rem .8rem; font-weight: 600 }
.warning { border-left: 4px solid #e69f00; padding: .4rem .8rem }
.dim { color: var(--dim) } .bad { color: var(--bad) } p, li, dd { overflow-wrap: anywhere }
img { width: 100%; height: auto; background: #fff; border-radius: 6px }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .55rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
td.bad { text-align: left; white-space: normal } th { color: var(--dim); font-weight: 500 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .9rem } dd { margin: 0 }
@media (max-width: 36rem) {
  body { font-size: 15px; padding: .7rem } th, td { padding: .25rem .17rem; font-size: .74rem }
  th { white-space: normal } dl { grid-template-columns: 1fr } dt { margin-top: .4rem }
}
"""


def page(result: ProfileResult, png: bytes, narrow_png: bytes) -> str:
    """Return the page as HTML with both pictures inside, one for narrow screens; every text from outside is escaped."""
    wide, narrow = (f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}" for data in (png, narrow_png))
    parts = [f"<h1>Latency per batch size</h1><p>{escape(title_of(result))}</p>"]
    if result.budget:
        parts.append(f'<p class="budget">{escape(result.budget)}</p>')
    parts += [f'<p class="warning">{escape(text)}</p>' for text in result.warnings]
    alt = (
        "Plots against batch size, one curve for each back-end: latency in milliseconds, images per second and, where "
        "known, memory and the roofline"
    )
    source = f'<source media="(max-width: 36rem)" srcset="{narrow}">'
    parts.append(f'<picture>{source}<img alt="{alt}" src="{wide}"></picture>')
    parts += [_backend(backend) + _work(result, backend) for backend in result.backends]
    parts.append("<h2>How to read this</h2><ul>" + "".join(f"<li>{escape(n)}</li>" for n in notes(result)) + "</ul>")
    facts = {"command": result.command, "date": result.date, "seconds per batch size": f"{result.duration_s:g}"}
    facts = {**facts, **result.versions}
    rows = "".join(f"<dt class=dim>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items() if v)
    parts.append(f"<h2>Made with</h2><dl>{rows}</dl>")
    return document(f"{result.source}: latency", "\n".join(parts))


def document(title: str, body: str) -> str:
    """Return a whole page around ``body``, which is HTML; ``title`` is text."""
    head = (
        '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _backend(backend: BackendResult) -> str:
    name, _, rest = heading(backend).partition(": ")
    tone = "bad" if backend.reason else "dim"
    head = f'<h2>{escape(name)}</h2><p class="{tone}">{escape(rest)}</p>'
    if not backend.cells:
        return head
    names = columns(backend)
    rows = []
    for cell in backend.cells:
        if cell.status == "ok":
            rows.append("".join(f"<td>{escape(text)}</td>" for text in values(backend, cell)))
        else:
            rows.append(f'<td>{cell.batch}</td><td class="bad" colspan="{len(names) - 1}">{escape(cell.reason)}</td>')
    return head + table(names, rows)


def _work(result: ProfileResult, backend: BackendResult) -> str:
    """Return the table of arithmetic, energy and clocks, empty where nothing of it is known."""
    names = work_columns(backend)
    if not names:
        return ""
    cells = [work_values(result, cell) for cell in backend.cells if cell.status == "ok"]
    rows = ["".join(f"<td>{escape(cell[name])}</td>" for name in ("batch", *names)) for cell in cells]
    return table(["batch", *names], rows)


def table(names: list[str], rows: list[str]) -> str:
    """Return a table that scrolls sideways; rows are ready ``td`` elements."""
    top = "".join(f"<th>{escape(n)}</th>" for n in names)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
