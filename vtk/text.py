"""Text from others, made harmless for a terminal, a page or a plot.

Names of files and classes, fields of cards and messages of servers may hold anything: sequences that drive a terminal,
line ends that make a second line look like our own, marks that turn the order of reading round.
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
    """Return a text whose line ends and tabs stay: a traceback, a help, the message of a library."""
    return "\n".join(printable(line.expandtabs()) for line in value.split("\n"))


def printable_json(value: str) -> str:
    """Return JSON of the same values in which nothing but line ends drives a terminal."""
    return _HIDDEN.sub(lambda found: found[0] if found[0].isprintable() else _unicode(found[0]), value)


def in_plot(value: str) -> str:
    r"""Return a text for a plot: matplotlib takes ``$…$`` for a formula, and hides what begins with ``_``."""
    shown = printable(value).replace("$", r"\$")
    return f"\u200b{shown}" if shown.startswith("_") else shown


def _unicode(letter: str) -> str:
    pair = letter.encode("utf-16-be", "surrogatepass").hex()
    return "".join(rf"\u{pair[i : i + 4]}" for i in range(0, len(pair), 4))
