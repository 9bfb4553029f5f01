"""Separators between the labels of one image in a table: found from all cells of labels, or given."""

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from vtk.data.sources.layout import class_name
from vtk.data.sources.table import LIST
from vtk.errors import DataError
from vtk.text import one_line

SURE = (LIST, ";", "|")
"""What is in no label's name, if it is in a cell; the first that there is separates. A comma comes after these."""


def find_separator(table: Path, cells: Sequence[str], known: Collection[str] = ()) -> tuple[str, str]:
    """Return what separates labels, and a sentence about it where it is none of version 0.1's (``;``).

    A blank separates where labels that are joined by it also come alone or in other company: ``cat dog`` beside
    ``cat`` and ``dog``. It does not where no word of a cell comes in another one: ``polar bear`` beside ``otter``.

    Args:
        table: for messages.
        cells: of labels, one of each image.
        known: labels of a trained model.

    Raises:
        DataError: blanks could be either.
    """
    cells = sorted({class_name(cell) for cell in cells if cell})
    if known and all(cell in known for cell in cells):
        return ";", ""
    for separator in (*SURE, ","):
        if first := next((cell for cell in cells if separator in cell), None):
            if separator in (LIST, ";"):
                return separator, ""
            return separator, _told(table, repr(separator), first)
    joined = [cell for cell in cells if len(cell.split()) > 1]
    if not joined:
        return ";", ""
    words = {word for cell in cells for word in cell.split()}
    if known:
        separate = words <= set(known)
        return (" ", _told(table, "a blank", joined[0])) if separate else (";", "")
    company = Counter(word for cell in cells for word in set(cell.split()))
    shared = {word for cell in joined for word in cell.split() if company[word] > 1}
    if not shared:
        return ";", ""
    if shared == {word for cell in joined for word in cell.split()} or len(cells) > len(words):
        return " ", _told(table, "a blank", joined[0])
    raise DataError(
        f"{table}: is {one_line(joined[0])!r} one label or several? Give --label-separator space, or --label-separator "
        "';' if blanks belong to the names"
    )


def split_labels(cell: str, separator: str) -> list[str]:
    """Return the labels of a cell, without blanks around them and in composed Unicode."""
    parts = cell.split() if separator == " " else cell.split(separator)
    return [class_name(part) for part in map(str.strip, parts) if part]


def looks_joined(cell: str) -> bool:
    """Tell whether a cell has several labels for certain."""
    return any(separator in cell for separator in SURE)


def joined_labels(labels: Collection[str]) -> list[str]:
    """Return the labels that are two or more of the others with a comma or a blank between them."""
    found = []
    for label in sorted(labels):
        parts = [split_labels(label, separator) for separator in (",", " ")]
        if any(len(own) > 1 and set(own) <= set(labels) for own in parts):
            found.append(label)
    return found


def _told(table: Path, what: str, cell: str) -> str:
    return (
        f"labels of {table.name} are separated by {what}: {one_line(cell)!r} are several (--label-separator says "
        "otherwise)"
    )
