"""Choice tables as files and in memory: read, checked, written, and laid over one another."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtk_kernels._nearest import versions

FIELDS = ("device", "torch", "triton", "op", "dtype", "rows", "n", "k")
"""What an entry is about; a table has no two entries about the same."""

VARIABLE = "VTK_CHOICES"
"""Environment variable with the path of a table that goes over all others."""

_LARGEST = 2**32

Entry = dict[str, Any]


class ChoiceTableError(ValueError):
    """A choice table cannot be used; one line says which and why."""


@dataclass(frozen=True)
class Table:
    """Entries and where they come from: "VTK_CHOICES (PATH)", "tuned" or "package"."""

    name: str
    entries: tuple[Entry, ...]


def read(path: Path, allowed: Mapping[str, tuple[str, ...]]) -> list[Entry]:
    """Return the entries of a file.

    Raises:
        ChoiceTableError: no file, no table, an entry that says nothing this version knows, or two about the same.
    """
    if path.exists() and not path.is_file():
        raise ChoiceTableError(f"{path} is no file")
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["schema"] != 1:
            raise ValueError(f"schema {table['schema']}, this version reads 1")
        entries = table["measured"]
    except OSError as error:
        raise ChoiceTableError(f"{path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ChoiceTableError(f"{path} is no choice table: {type(error).__name__}: {error}") from error
    return check(entries, str(path), allowed)


def check(entries: Any, where: str, allowed: Mapping[str, tuple[str, ...]]) -> list[Entry]:
    """Return ``entries`` as a list if each of them can be used.

    Raises:
        ChoiceTableError: an entry says nothing this version knows, or two are about the same.
    """
    seen = set()
    try:
        found: list[Entry] = list(entries)
        for entry in found:
            if entry["choice"] not in allowed[entry["op"]]:
                raise ValueError(f"`choice` ({entry['choice']!r}) must be one of {allowed[entry['op']]}: {entry}")
            if not all(type(entry[field]) is int and 0 < entry[field] <= _LARGEST for field in ("rows", "n", "k")):
                raise ValueError(f"`rows`, `n` and `k` must be whole numbers from 1 to 2³²: {entry}")
            if not all(isinstance(entry[field], str) for field in ("device", "torch", "triton", "dtype")):
                raise ValueError(f"`device`, `torch`, `triton` and `dtype` must be text: {entry}")
            versions(entry)
            seen.add(tuple(entry[field] for field in FIELDS))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ChoiceTableError(f"{where} is no choice table: {type(error).__name__}: {error}") from error
    if len(seen) < len(found):
        raise ChoiceTableError(f"{where} has two entries with the same {', '.join(FIELDS)}; keep the later measurement")
    return found


def text(entries: Iterable[Entry]) -> str:
    """Return the text of a table's file: an entry a line, in order."""
    lines = sorted(entries, key=lambda entry: [entry[field] for field in FIELDS])
    return '{\n  "schema": 1,\n  "measured": [\n' + ",\n".join(f"    {json.dumps(e)}" for e in lines) + "\n  ]\n}\n"


class Layers:
    """The package's table, one tuned on this card over it, and that of `VARIABLE` over both.

    Args:
        path: of the package's table.
        allowed: choices of each operation.
    """

    def __init__(self, path: Path, allowed: Mapping[str, tuple[str, ...]]) -> None:
        self.path, self.allowed = path, allowed
        self.tuned: Table | None = None

    def register(self, table: str | os.PathLike[str] | Iterable[Entry] | None) -> None:
        """Take a table as the tuned one, from its file or as entries; None for no such table."""
        if table is None:
            self.tuned = None
        elif isinstance(table, str | os.PathLike):
            self.tuned = Table("tuned", tuple(read(Path(table), self.allowed)))
        else:
            self.tuned = Table("tuned", tuple(check(table, "the tuned table", self.allowed)))

    def tables(self) -> tuple[Table, ...]:
        """Return the tables, the upper one first.

        Raises:
            ChoiceTableError: the one that `VARIABLE` names cannot be used.
        """
        named, found = os.environ.get(VARIABLE, ""), []
        if named:
            try:
                found.append(Table(f"{VARIABLE} ({named})", tuple(read(Path(named), self.allowed))))
            except ChoiceTableError as error:
                advice = "give the path of a choice table, or unset it"
                raise ChoiceTableError(f"{VARIABLE}: {error}; {advice}") from error
        return (*found, *([self.tuned] if self.tuned else []), Table("package", tuple(read(self.path, self.allowed))))
