"""Matches the rows of a classifier by class name."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vtk.card import Card
from vtk.errors import DataError
from vtk.formats import read_json

_PLACEHOLDER = re.compile(r"(LABEL_|class_?)?\d+", re.IGNORECASE)
_SHOWN = 3


def read_names(path: Path, card: Card | None) -> tuple[str, ...]:
    """Return the class names of a weights file, from its card or the ``config.json`` beside it.

    timm's checkpoints on the hub have ``label_names`` there, transformers' ``id2label``; placeholders such as
    LABEL_0 are ignored.
    """
    if card is not None:
        return card.classes
    beside = path.parent / "config.json"
    if not beside.is_file():
        return ()
    try:
        config = read_json(beside)
    except DataError:
        return ()
    if not isinstance(config, Mapping):
        return ()
    found: Any = config.get("label_names") or _numbered(config.get("id2label"))
    if not isinstance(found, list) or not found or not all(isinstance(name, str) for name in found):
        return ()
    names = tuple(found)
    if len(set(names)) != len(names) or all(_PLACEHOLDER.fullmatch(name) for name in names):
        return ()
    return names


def _numbered(names: Any) -> list[Any] | None:
    if not isinstance(names, Mapping) or not all(str(i) in names for i in range(len(names))):
        return None
    return [names[str(i)] for i in range(len(names))]


def match_rows(known: Sequence[str], wanted: Sequence[str]) -> list[int] | None:
    """Return the row of each wanted class in a classifier of the known ones; None if a class is missing."""
    row = {name: i for i, name in enumerate(known)}
    return [row[name] for name in wanted] if all(name in row for name in wanted) else None


def pick_rows(value: Tensor, known: Sequence[str], rows: Sequence[int] | None) -> Tensor | None:
    """Return rows of a classifier's weight or bias; None if it has other classes."""
    if rows is None or not value.ndim or value.shape[0] != len(known):
        return None
    return value[list(rows)]


def describe_rows(known: Sequence[str], wanted: Sequence[str]) -> str:
    """Return a note on how a classifier of the known classes is used; empty if it is unchanged."""
    if tuple(known) == tuple(wanted):
        return ""
    if match_rows(known, wanted) is None:
        absent = [name for name in wanted if name not in set(known)]
        shown = ", ".join(absent[:_SHOWN]) + (f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else "")
        return f"the classifier has other classes ({len(known)}, without {shown}): a new one is initialised"
    how = "in another order" if len(known) == len(wanted) else f"among {len(known)}"
    return f"the classifier has the classes {how}: rows are matched by name"
