"""Names: what a model may be called, and the file of class names that the server reads.

A model's name is a folder's name and a part of URLs and of the config, so only harmless ones are taken. Class names are
whatever folders were called; they are written to files line by line and as JSON, never into the config.
"""

import re

from vtk.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?", re.ASCII)
RULE = "use up to 64 of A-Z a-z 0-9 . _ - with a letter or digit at both ends"


def check_name(name: str) -> str:
    """Return a model's name, or refuse it.

    Raises:
        UsageError: says which are taken.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"a model cannot be called {name!r} in a server; {RULE}: --name NAME")
    return name


def label_lines(classes: tuple[str, ...]) -> str:
    """Return the label file: the i-th line names the i-th class.

    What would end a line is written as an escape, since every later line would else name another class.
    """
    return "".join(f"{_one_line(name)}\n" for name in classes)


def _one_line(name: str) -> str:
    # a lone surrogate stands for a byte of a folder's name that is not UTF-8; it is written back as that byte
    keep = (c if c.isprintable() or 0xDC80 <= ord(c) <= 0xDCFF else c.encode("unicode_escape").decode() for c in name)
    return "".join(keep)
