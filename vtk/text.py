"""Escapes text from outside for terminals, pages and plots.

Names of files and classes, fields of cards and messages of servers may hold terminal control sequences, line ends that
forge a second line, or marks that reverse the reading order.
"""

import os
import re

_HIDDEN = re.compile(r"[^\n -~]")


def printable(value: str) -> str:
    """Return a text in which line ends, control characters and what is not UTF-8 are shown as escapes."""
    return value if value.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)


def one_line(path: str | os.PathLike[str]) -> str:
    """Return a path for a message, as `printable` does."""
    return printable(os.fspath(path))


def several_lines(value: str) -> str:
    """Return a text of several lines, each escaped: a traceback, a help text, the message of a library."""
    return "\n".join(printable(line.expandtabs()) for line in value.split("\n"))


def printable_json(value: str) -> str:
    """Return JSON of the same values, with control characters but line ends escaped."""
    return _HIDDEN.sub(lambda match: match[0] if match[0].isprintable() else _unicode(match[0]), value)


def in_plot(value: str) -> str:
    r"""Return a text for a plot: matplotlib takes ``$…$`` for a formula, and hides what begins with ``_``."""
    shown = printable(value).replace("$", r"\$")
    return f"\u200b{shown}" if shown.startswith("_") else shown


def _unicode(letter: str) -> str:
    pair = letter.encode("utf-16-be", "surrogatepass").hex()
    return "".join(rf"\u{pair[i : i + 4]}" for i in range(0, len(pair), 4))
