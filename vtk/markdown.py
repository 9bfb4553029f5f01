"""Values in Markdown: code spans and blocks that stay literal whatever text they hold."""

import json
import re

from vtk.text import printable, printable_json


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
    """Return a name as one line of a block: JSON, with what cannot be printed as escapes of JSON."""
    return printable_json(json.dumps(name, ensure_ascii=False))


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
