"""Boxes, arrows and lines of text as an SVG picture that can be read on a phone, on light and on dark pages."""

from collections.abc import Sequence
from html import escape

WIDTH = 480
"""Units across a picture: a phone shows them in about 360 pixels, so that text of 15 units is still 11 pixels high."""
MARGIN = 14
LINE = 19
"""From one line of text to the next."""
STYLE = """
.page { fill: #ffffff } .box { stroke: #8a93a6; stroke-width: 1 }
text { fill: #1c2230; font: 15px system-ui, sans-serif }
.name { font-weight: 700 } .small { font-size: 14px } .mid { text-anchor: middle }
.line { stroke: #5b6478; stroke-width: 2; fill: none } .head { fill: #5b6478 }
.f0 { fill: #eef1f7 } .f1 { fill: #e3edff } .f2 { fill: #e5f5ea } .f3 { fill: #fdf1dc } .f4 { fill: #f6e8f5 }
@media (prefers-color-scheme: dark) {
.page { fill: #1e2129 } .box { stroke: #7d8699 } text { fill: #e8ebf2 }
.line { stroke: #a9b1c2 } .head { fill: #a9b1c2 }
.f0 { fill: #2a2f3a } .f1 { fill: #20365c } .f2 { fill: #1f4030 } .f3 { fill: #4a3a1c } .f4 { fill: #432c42 } }
"""
Texts = Sequence[tuple[str, str]]
"""Lines of a box: each with its class."""


def box(x: float, y: float, width: float, texts: Texts, fill: int) -> tuple[str, float]:
    """Return a box that is as high as its lines of text, and the height."""
    height = LINE * len(texts) + 14
    parts = [f'<rect class="box f{fill}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7"/>']
    for i, (kind, text) in enumerate(texts):
        left = x + width / 2 if "mid" in kind else x + 10
        parts.append(f'<text class="{kind}" x="{left:g}" y="{y + 22 + LINE * i:g}">{escape(text)}</text>')
    return "\n".join(parts), height


def row(y: float, boxes: Sequence[Texts], fill: int, left: float = MARGIN, gap: float = 8) -> tuple[str, float]:
    """Return boxes side by side over the whole width, all as high as the highest, and that height."""
    width = (WIDTH - left - MARGIN - gap * (len(boxes) - 1)) / len(boxes)
    lines = max(map(len, boxes))
    drawn = [
        box(left + i * (width + gap), y, width, [*texts, *[("", "")] * (lines - len(texts))], fill)
        for i, texts in enumerate(boxes)
    ]
    return "\n".join(part for part, _ in drawn), drawn[0][1]


def arrow(x: float, y: float, length: float) -> str:
    """Return an arrow downwards."""
    end = y + length
    return (
        f'<path class="line" d="M{x:g} {y:g} V{end - 8:g}"/><path class="head" d="M{x - 6:g} {end - 9:g} h12 l-6 9 z"/>'
    )


def note(x: float, y: float, text: str, kind: str = "small") -> str:
    """Return a line of text."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def picture(parts: Sequence[str], height: float, title: str) -> str:
    """Return the whole file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img">'
    page = f'<rect class="page" width="{WIDTH}" height="{height:g}" rx="10"/>'
    return (
        "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", page, *parts, "</svg>"]) + "\n"
    )
