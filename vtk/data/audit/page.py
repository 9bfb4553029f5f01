"""The HTML page of ``vtk data audit``: one file with embedded thumbnails, readable on a phone."""

import base64
import io
import warnings
from html import escape
from pathlib import Path

from PIL import Image

from vtk.data.audit import page_files
from vtk.data.audit.result import DataAudit
from vtk.data.audit.unusual import UnusualImage, UnusualKind
from vtk.data.decoding.decode import preview
from vtk.data.decoding.rules import SRGB, Decoding
from vtk.errors import DataError
from vtk.files import write_text
from vtk.html import text as _text
from vtk.nodes import check_file

_MARK = '<meta name="generator" content="vtk data audit">'
_SIDE = 144  # px of a thumbnail's longer side; shown at half of it, so sharp on a dense screen
_CLASSES = 40

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --dim: #5f6368; --line: #dadce0; --bg: #ffffff; --bar: #0072b2;
  --held: #e69f00; --bad: #b3261e; --card: #f5f6f7 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --dim: #a6abb1; --line: #3c4043; --bg: #17181a; --bad: #f2b8b5; --card: #222427 }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 66rem; padding: 1rem; background: var(--bg); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.3rem; margin: 0 0 .2rem; overflow-wrap: anywhere } h2 { font-size: 1.05rem; margin: 1.8rem 0 .2rem }
p { margin: .3rem 0; overflow-wrap: anywhere } .dim { color: var(--dim) } .bad { color: var(--bad) }
.warning { border-left: 4px solid var(--held); padding: .3rem .8rem }
.facts { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0 }
.facts div { background: var(--card); border-radius: 8px; padding: .5rem .9rem } .facts b { display: block;
  font-size: 1.25rem; font-variant-numeric: tabular-nums }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid var(--line) }
th { color: var(--dim); font-weight: 500 } th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere }
td.bar { width: 45%; white-space: nowrap; text-align: left }
td.bar span { display: inline-block; height: .7rem; background: var(--bar); vertical-align: middle }
td.bar span + span { background: var(--held) }
th.bar { text-align: left !important } th.bar i { font-style: normal; padding-left: .4rem; margin-right: .6rem }
.t { border-left: .7rem solid var(--bar) } .h { border-left: .7rem solid var(--held) }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .7rem; margin: .7rem 0 }
figure { margin: 0; background: var(--card); border-radius: 8px; padding: .6rem; min-width: 0 }
.frame { height: 80px; display: flex; align-items: center; justify-content: center }
.frame img { max-width: 100%; max-height: 80px; border: 1px solid var(--line) }
.frame svg { width: 48px; height: 48px; color: var(--bad) }
figcaption { font-size: .8rem; line-height: 1.35; margin-top: .4rem; overflow-wrap: anywhere }
@media (max-width: 36rem) { body { font-size: 15px; padding: .7rem } .grid { grid-template-columns: repeat(2, 1fr) }
  td.bar { display: none } th.bar { display: none } }
"""

_BROKEN = (
    '<svg viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="1.5" role="img" aria-label="unreadable">'
    '<path d="M6 3h8l4 4v14H6z"/><path d="M9 11l6 6m0-6l-6 6"/></svg>'
)


def check_page(path: Path, *, overwrite: bool) -> None:
    """Refuse to overwrite a file that is not an earlier page of this command.

    Raises:
        DataError: it is a folder, or another file and ``overwrite`` is not given.
    """
    check_file(path, example="audit.html")
    if path.exists() and not overwrite:
        with path.open("rb") as file:
            if _MARK.encode() not in file.read(4096):
                raise DataError(f"`--out` {path} exists and is not an audit page; give another name, or --overwrite")


def write_page(path: Path, audit: DataAudit) -> None:
    """Write the page of an audit atomically.

    Raises:
        DataError: it cannot be written.
    """
    write_text(path, page(audit))


def page(audit: DataAudit) -> str:
    """Return the page as HTML; all text is escaped."""
    title = f"Audit of {audit.root.name or audit.root}"
    parts = [f"<h1>{_text(title)}</h1><p class=dim>{_text(str(audit.root))}</p>", _facts(audit)]
    parts += [f'<p class="warning">{_text(warning)}</p>' for warning in audit.warnings]
    parts += [f"<p>{_text(note)}</p>" for note in audit.notes]
    parts.append(page_files.copies(audit, lambda image: _figure(audit, image)))
    parts += [_kind(audit, odd) for odd in audit.odd]
    if not audit.odd:
        parts.append("<h2>Nothing unusual</h2><p>Every file was read, and no image is unusual.</p>")
    parts += [page_files.files(audit), _classes(audit)]
    head = (
        f'<meta charset="utf-8">\n{_MARK}\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title><style>{_STYLE}{page_files.STYLE}</style>"
    )
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _facts(audit: DataAudit) -> str:
    s = audit.sizes
    facts = [
        (len(audit.classes), audit.noun[1]), (len(audit.train), "training images"), (len(audit.val), "held out"),
        (len(audit.bad), "unreadable"), (audit.left.total, "not used"),
    ]  # fmt: skip
    cells = [f"<div><b>{value:,}</b>{escape(name)}</div>" for value, name in facts]
    if s:
        median = f"{s['median_height']}×{s['median_width']}"
        between = f"{s['min_height']}×{s['min_width']} to {s['max_height']}×{s['max_width']}"
        cells.append(f"<div><b>{median}</b>median height×width; {between} px</div>")
    modes = ", ".join(f"{mode} {count:,}" for mode, count in audit.modes.items())
    return f'<div class="facts">{"".join(cells)}</div><p class=dim>Modes: {_text(modes)}</p>'


def _kind(audit: DataAudit, odd: UnusualKind) -> str:
    shown = f", {len(odd.examples)} shown" if odd.total > len(odd.examples) else ""
    head = f"<h2>{_text(odd.title)} <span class=dim>({odd.total:,}{shown})</span></h2>"
    figures = "".join(_figure(audit, example) for example in odd.examples)
    return f'{head}<p class=dim>{_text(odd.handling)}</p><div class="grid">{figures}</div>'


def _figure(audit: DataAudit, example: UnusualImage) -> str:
    path = audit.folder / example.name
    inside = audit.is_inside(path)
    data = thumbnail(path, audit.max_pixels, audit.decoding) if inside else ""
    frame = f'<img alt="" src="data:image/jpeg;base64,{data}">' if data else _BROKEN
    tone = "dim" if data else "bad"
    reason = example.text if inside else f"{example.text}; not shown: the file is outside the folder"
    caption = f'{_text(example.name)}<br><span class="{tone}">{_text(reason)}</span>'
    return f'<figure><div class="frame">{frame}</div><figcaption>{caption}</figcaption></figure>'


def _classes(audit: DataAudit) -> str:
    train, val = audit.counts("train"), audit.counts("val")
    order = sorted(range(len(train)), key=lambda i: (train[i], i))
    if left := max(len(order) - _CLASSES, 0):
        order = order[: _CLASSES // 2] + order[-_CLASSES // 2 :]
    most = max([t + v for t, v in zip(train, val, strict=True)], default=1) or 1
    rows = []
    for i in order:
        bars = "".join(f'<span style="width:{90 * n / most:.1f}%"></span>' for n in (train[i], val[i]))
        name = _text(audit.classes[i])
        rows.append(f'<tr><td>{name}</td><td>{train[i]:,}</td><td>{val[i]:,}</td><td class="bar">{bars}</td></tr>')
    top = f'<th>{audit.noun[0]}</th><th>train</th><th>held out</th><th class="bar">'
    top += '<i class="t">train</i> <i class="h">held out</i></th>'
    noun = audit.noun[1]
    more = f"<p class=dim>The smallest and the largest {noun}; {left:,} in between are not shown.</p>" if left else ""
    body = "".join(rows)
    return f'<h2>{noun.capitalize()}</h2>{more}<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def thumbnail(path: Path, max_pixels: int, decoding: Decoding = SRGB) -> str:
    """Return a small upright JPEG as base64 (the first band of many); empty if the file cannot be shown."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            small = preview(path, max_pixels, decoding, 2 * _SIDE)
        scale = min(_SIDE / max(small.size), 4)  # tiny images are enlarged without smoothing
        size = [max(round(side * scale), 1) for side in small.size]
        resample = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
        out = io.BytesIO()
        small.resize((size[0], size[1]), resample).save(out, "JPEG", quality=80)
    except Exception:  # the audit has the reason; the page shows an icon
        return ""
    return base64.b64encode(out.getvalue()).decode("ascii")
