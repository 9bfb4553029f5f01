"""Detects the separator between the labels of an image in a table."""

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from vtk.data.sources.layout import class_name
from vtk.data.sources.table import LIST
from vtk.errors import DataError
from vtk.text import one_line

SURE = (LIST, ";", "|")
"""Separators that label names do not contain, in order of precedence; a comma comes after these."""


def find_separator(table: Path, cells: Sequence[str], known: Collection[str] = ()) -> tuple[str, str]:
    """Return the separator, and a note unless it is that of version 0.1 (``;``).

    A space separates if the words also occur alone or in other combinations (``cat dog`` beside ``cat`` and ``dog``),
    and does not if no word of a cell occurs in another (``polar bear`` beside ``otter``).

    Args:
        table: for messages.
        cells: labels of each image.
        known: labels of a trained model.

    Raises:
        DataError: spaces could be either.
    """
    cells = sorted({class_name(cell) for cell in cells if cell})
    if known and all(cell in known for cell in cells):
        return ";", ""
    for separator in (*SURE, ","):
        if first := next((cell for cell in cells if separator in cell), None):
            if separator in (LIST, ";"):
                return separator, ""
            return separator, _note(table, repr(separator), first)
    joined = [cell for cell in cells if len(cell.split()) > 1]
    if not joined:
        return ";", ""
    words = {word for cell in cells for word in cell.split()}
    if known:
        separate = words <= set(known)
        return (" ", _note(table, "a space", joined[0])) if separate else (";", "")
    company = Counter(word for cell in cells for word in set(cell.split()))
    shared = {word for cell in joined for word in cell.split() if company[word] > 1}
    if not shared:
        return ";", ""
    if shared == {word for cell in joined for word in cell.split()} or len(cells) > len(words):
        return " ", _note(table, "a space", joined[0])
    raise DataError(
        f"{table}: is {one_line(joined[0])!r} one label or several? Give --label-separator space, or --label-separator "
        "';' if names contain spaces"
    )


def split_labels(cell: str, separator: str) -> list[str]:
    """Return the labels of a cell, stripped and in composed Unicode (NFC)."""
    parts = cell.split() if separator == " " else cell.split(separator)
    return [class_name(part) for part in map(str.strip, parts) if part]


def looks_joined(cell: str) -> bool:
    """Return whether a cell certainly has several labels."""
    return any(separator in cell for separator in SURE)


def joined_labels(labels: Collection[str]) -> list[str]:
    """Return the labels that are combinations of other labels with commas or spaces."""
    found = []
    for label in sorted(labels):
        parts = [split_labels(label, separator) for separator in (",", " ")]
        if any(len(own) > 1 and set(own) <= set(labels) for own in parts):
            found.append(label)
    return found


def _note(table: Path, what: str, cell: str) -> str:
    return (
        f"labels of {table.name} are separated by {what}: {one_line(cell)!r} are several (--label-separator sets "
        "another)"
    )
