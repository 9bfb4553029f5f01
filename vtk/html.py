"""Self-contained HTML pages: pictures are embedded, nothing is fetched, readable on a phone and on paper."""

import base64
from collections.abc import Sequence
from html import escape

from vtk.text import printable

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


def document(title: str, body: str, *, style: str = "") -> str:
    """Return a page around ``body`` (HTML); ``title`` is text, ``style`` CSS rules after the common ones."""
    head = (
        '<meta charset="utf-8">\n<meta name="generator" content="vtk">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title><style>{_STYLE}{style}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def table(names: Sequence[str], rows: Sequence[str]) -> str:
    """Return a table that scrolls sideways; names are text, rows ready ``td`` elements."""
    top = "".join(f"<th>{text(n)}</th>" for n in names)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def text(value: str) -> str:
    """Escape text from outside for HTML; characters that cannot be printed are escaped by `printable`."""
    return escape(printable(value))


def data_uri(data: bytes, kind: str = "image/png") -> str:
    """Return a picture as a ``data:`` URI for an ``img``."""
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"
