"""Untrusted text in Markdown: code spans and code blocks that show it, whatever it holds, and nothing else."""

import json
import re


def span(value: object) -> str:
    """Return a Markdown code span that shows ``value`` (JSON where it is no text) and nothing else."""
    text = printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
    ticks = "`" * (_longest_run(text) + 1)
    pad = " " if not text or text[0] in "` " or text[-1] in "` " else ""
    return f"{ticks}{pad}{text or '-'}{pad}{ticks}"


def block(text: str, language: str = "text") -> str:
    """Return a fenced code block that no line of ``text`` can end."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}\n"


def quoted(name: str) -> str:
    """Return a name as a JSON string on one line."""
    return printable(json.dumps(name, ensure_ascii=False))


def printable(text: str) -> str:
    """Escape line breaks, control and direction characters: a page shows one line for one line, in reading order.

    In a JSON string the escapes are JSON's, so that it still reads as the same name.
    """
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(c: str) -> str:
    if ord(c) > 0xFFFF:
        pair = c.encode("utf-16-be", "surrogatepass").hex()
        return f"\\u{pair[:4]}\\u{pair[4:]}"
    known = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return known.get(c) or f"\\u{ord(c):04x}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
