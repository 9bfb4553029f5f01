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
_LONGEST, _LONGEST_PATH = 300, 1000

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
    where = _shown(path, _LONGEST_PATH)
    try:
        if path.exists() and not path.is_file():
            raise ChoiceTableError(f"{where} is no file")
        table = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_each_key_once)
        if type(table["schema"]) is not int or table["schema"] != 1:
            raise ValueError(f"schema {table['schema']}, this version reads 1")
        entries = table["measured"]
    except OSError as error:
        raise ChoiceTableError(f"{where} cannot be read: {error.strerror}") from error
    except ChoiceTableError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ChoiceTableError(f"{where} is no choice table: {_reason(error)}") from error
    return check(entries, where, allowed)


def check(entries: Any, where: str, allowed: Mapping[str, tuple[str, ...]]) -> list[Entry]:
    """Return ``entries`` as a list if each of them can be used.

    Raises:
        ChoiceTableError: an entry says nothing this version knows, or two are about the same.
    """
    seen = set()
    try:
        found: list[Entry] = list(entries)
        for entry in found:
            if entry["op"] not in allowed:
                raise ValueError(f"`op` ({entry['op']!r}) must be one of {tuple(allowed)}")
            if entry["choice"] not in allowed[entry["op"]]:
                raise ValueError(f"`choice` ({entry['choice']!r}) must be one of {allowed[entry['op']]}: {entry}")
            if not all(type(entry[field]) is int and 0 < entry[field] <= _LARGEST for field in ("rows", "n", "k")):
                raise ValueError(f"`rows`, `n` and `k` must be whole numbers from 1 to 2³²: {entry}")
            if not all(isinstance(entry[field], str) for field in ("device", "torch", "triton", "dtype")):
                raise ValueError(f"`device`, `torch`, `triton` and `dtype` must be text: {entry}")
            versions(entry)
            seen.add(tuple(entry[field] for field in FIELDS))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ChoiceTableError(f"{where} is no choice table: {_reason(error)}") from error
    if len(seen) < len(found):
        raise ChoiceTableError(f"{where} has two entries with the same {', '.join(FIELDS)}; keep the later measurement")
    return found


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, which may say nothing twice: which of both is meant would be a guess."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has {next(n for n in names if names.count(n) > 1)!r} twice")
    return found


def _reason(error: Exception) -> str:
    """Return an error in a line, without the whole of what was read."""
    return f"{type(error).__name__}: {_shown(error, _LONGEST)}"


def _shown(value: object, longest: int) -> str:
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(value)[: longest + 1])
    return text if len(text) <= longest else f"{text[:longest]}…"


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
