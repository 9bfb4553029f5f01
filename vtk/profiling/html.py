"""The profile's report as one HTML file: plots inside, nothing is fetched, readable on a phone."""

from vtk.html import data_uri, document, table, text
from vtk.profiling.cells import BackendResult
from vtk.profiling.result import ProfileResult
from vtk.profiling.rows import columns, heading, notes, values, work_columns, work_values
from vtk.profiling.rows import title as title_of


def page(result: ProfileResult, png: bytes, narrow_png: bytes) -> str:
    """Return the page as HTML with both pictures inside, one for narrow screens; every text from outside is escaped."""
    wide, narrow = (data_uri(data) for data in (png, narrow_png))
    parts = [f"<h1>Latency per batch size</h1><p>{text(title_of(result))}</p>"]
    if result.budget:
        parts.append(f'<p class="budget">{text(result.budget)}</p>')
    parts += [f'<p class="warning">{text(warning)}</p>' for warning in result.warnings]
    alt = (
        "Plots against batch size, one curve for each back-end: latency in milliseconds, images per second and, where "
        "known, memory and the roofline"
    )
    source = f'<source media="(max-width: 36rem)" srcset="{narrow}">'
    parts.append(f'<picture>{source}<img alt="{alt}" src="{wide}"></picture>')
    parts += [_backend(backend) + _work(result, backend) for backend in result.backends]
    parts.append("<h2>How to read this</h2><ul>" + "".join(f"<li>{text(n)}</li>" for n in notes(result)) + "</ul>")
    facts = {"command": result.command, "date": result.date, "seconds per batch size": f"{result.duration_s:g}"}
    facts = {**facts, **result.versions}
    rows = "".join(f"<dt class=dim>{text(k)}</dt><dd>{text(v)}</dd>" for k, v in facts.items() if v)
    parts.append(f"<h2>Environment</h2><dl>{rows}</dl>")
    return document(f"{result.source}: latency", "\n".join(parts))


def _backend(backend: BackendResult) -> str:
    name, _, rest = heading(backend).partition(": ")
    tone = "bad" if backend.reason else "dim"
    head = f'<h2>{text(name)}</h2><p class="{tone}">{text(rest)}</p>'
    if not backend.cells:
        return head
    names = columns(backend)
    rows = []
    for cell in backend.cells:
        if cell.status == "ok":
            rows.append("".join(f"<td>{text(value)}</td>" for value in values(backend, cell)))
        else:
            rows.append(f'<td>{cell.batch}</td><td class="bad" colspan="{len(names) - 1}">{text(cell.reason)}</td>')
    return head + table(names, rows)


def _work(result: ProfileResult, backend: BackendResult) -> str:
    """Return the table of arithmetic, energy and clocks, empty where nothing of it is known."""
    names = work_columns(backend)
    if not names:
        return ""
    cells = [work_values(result, cell) for cell in backend.cells if cell.status == "ok"]
    rows = ["".join(f"<td>{text(cell[name])}</td>" for name in ("batch", *names)) for cell in cells]
    return table(["batch", *names], rows)
