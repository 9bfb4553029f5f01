"""Reads tables of labels as rows of text: CSV, TSV and Parquet, with any column separator."""

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vtk import packages
from vtk.data.decoding.images import SUFFIXES
from vtk.errors import DataError, UsageError
from vtk.readers import check_plain, reading, short

TABLES = (".csv", ".tsv", ".parquet", ".pq")
"""Suffixes of tables of labels."""

PATHS = (
    "path", "image_path", "img_path", "file_path", "filepath", "filename", "file_name", "image_file", "impath", "image",
    "img", "file", "image_name", "image_id", "name", "id",
)  # fmt: skip
"""Names of the path column, in order of precedence; case is ignored, and ``-`` and spaces equal ``_``."""

LIST = "\x1f"
"""Separator between the labels of a list in Parquet files."""

_MOST_CELLS = 500_000_000
_BEGINNING = 20_000  # characters from which the separator is detected
_SEPARATORS = (",", ";", "\t")
_NAMED = {"comma": ",", "semicolon": ";", "tab": "\t", "\\t": "\t", "space": " ", "pipe": "|"}


class Row(NamedTuple):
    """A line of a table: its number, and its stripped cells."""

    line: int
    cells: list[str]

    @property
    def text(self) -> str:
        """The line as a message quotes it."""
        return repr(",".join(self.cells)[:60])


def is_table(path: Path) -> bool:
    """Return whether a path has the suffix of a table of labels and is not a folder."""
    return path.suffix.lower() in TABLES and not path.is_dir()


def separator_of(text: str | None) -> str | None:
    """Return the character of an option's value such as ``tab``; None stays None.

    Raises:
        UsageError: it is not one character.
    """
    found = text if text is None else _NAMED.get(text.lower(), text)
    if found is not None and len(found) != 1:
        raise UsageError(f"{text!r} is not a separator; give comma, semicolon, tab, space, pipe, or one character")
    return found


def plain_head(text: str) -> str:
    """Return a column name in the form used for comparison."""
    return text.strip().lower().replace(" ", "_").replace("-", "_")


def read_rows(path: Path, separator: str | None = None) -> list[Row]:
    """Return all non-blank lines; the first one of a Parquet file has its column names.

    Args:
        path: the table.
        separator: of columns; None: detected as the one with which the first line names a path column, or else with
            which most lines begin with an image.

    Raises:
        DataError: the file is absent, damaged, not UTF-8 text, or empty.
        UnavailableError: a Parquet file without pyarrow installed.
    """
    if path.suffix.lower() in (".parquet", ".pq"):
        rows = _read_parquet(path)
    else:
        if not path.exists():
            raise DataError(f"cannot read {path} as a table of labels: No such file or directory")
        check_plain(path, "a table of labels")
        try:
            with path.open(encoding="utf-8-sig") as file:
                text = file.read()
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text (byte {error.start}); save the table as UTF-8") from error
        except (OSError, MemoryError) as error:
            raise DataError(f"cannot read {path} as a table of labels: {short(error)}") from error
        rows = _split(path, text, separator or _find_separator(path, text))
    if not rows:
        raise DataError(f"{path} names no images; write a line path,label for each")
    return rows


def is_called_image(cell: str) -> bool:
    """Return whether a cell has an image suffix."""
    return os.path.splitext(cell)[1].lower() in SUFFIXES


def is_image_of(root: Path, cell: str) -> bool:
    """Return whether a cell is the path of an image: by its suffix, or because the file exists."""
    if is_called_image(cell):
        return True
    try:
        return bool(cell) and (root / cell).is_file()
    except (OSError, ValueError):
        return False


def _find_separator(path: Path, text: str) -> str:
    candidates = ("\t", ",", ";") if path.suffix.lower() == ".tsv" else _SEPARATORS
    some = text[:_BEGINNING].rpartition("\n")[0] if len(text) > _BEGINNING else text
    best, found = 0.0, candidates[0]
    for separator in candidates:
        try:
            rows = _split(path, some, separator)
        except DataError:  # quoting does not fit this separator
            continue
        if rows and len(rows[0].cells) > 1 and any(plain_head(cell) in PATHS for cell in rows[0].cells):
            return separator
        score = sum(len(row.cells) > 1 and is_image_of(path.parent, row.cells[0]) for row in rows) / max(len(rows), 1)
        if score > best:
            best, found = score, separator
    return found


def _split(path: Path, text: str, separator: str) -> list[Row]:
    rows: list[Row] = []
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        for cells in reader:
            if any(map(str.strip, cells)):
                rows.append(Row(reader.line_num, [cell.strip() for cell in cells]))
    except csv.Error as error:
        raise DataError(f"cannot read {path} as a table of labels: line {reader.line_num}: {error}") from error
    return rows


def _read_parquet(path: Path) -> list[Row]:
    packages.require("pyarrow")
    from pyarrow import parquet

    check_plain(path, "a table of labels")
    with reading(path, "cannot be read as a Parquet file"), parquet.ParquetFile(path) as file:
        if file.metadata.num_rows * max(file.metadata.num_columns, 1) > _MOST_CELLS:
            raise DataError(f"{path} has {file.metadata.num_rows:,} rows; a table of labels has fewer")
        table = file.read()
        columns = [column.to_pylist() for column in table.columns]
    for name, values in zip(table.column_names, columns, strict=True):
        if any(isinstance(value, (dict, bytes)) for value in values[:100]):
            raise DataError(f"{path}: its column {name} has neither text nor numbers; give a column of paths")
    lines = [Row(i, list(map(_cell, values))) for i, values in enumerate(zip(*columns, strict=True), 1)]
    return [Row(0, list(table.column_names)), *lines] if lines else []


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return LIST.join(map(_cell, value)) if value else ""
    if isinstance(value, float) and value.is_integer():  # a column of whole numbers with gaps
        return str(int(value))
    return str(value).strip()


def head_of(rows: Sequence[Row], table: Path) -> list[str] | None:
    """Return the column names if the first line names a path column; None if it is already an image.

    Raises:
        DataError: it is neither.
    """
    heads = [plain_head(cell) for cell in rows[0].cells]
    if len(heads) > 1 and any(head in PATHS for head in heads) and not any(map(is_called_image, rows[0].cells)):
        return heads
    if is_image_of(table.parent, rows[0].cells[0]):
        return None
    raise DataError(
        f"{table} line {rows[0].line} is {rows[0].text}: neither an image with its label nor known column names; "
        "name the columns path,label or path,label,split"
    )
