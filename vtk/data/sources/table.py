"""Tables of labels as rows of text: CSV, TSV and parquet, whatever separates their columns."""

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
"""Endings of files that are tables of labels."""

PATHS = (
    "path", "image_path", "img_path", "file_path", "filepath", "filename", "file_name", "image_file", "impath", "image",
    "img", "file", "image_name", "image_id", "name", "id",
)  # fmt: skip
"""Heads of the column of paths, the surer first; upper and lower case, ``-`` and blanks for ``_`` alike."""

LIST = "\x1f"
"""Between the labels of a list, as parquet files have them."""

_MOST_CELLS = 500_000_000
_BEGINNING = 20_000  # characters that tell what separates columns
_SEPARATORS = (",", ";", "\t")
_NAMED = {"comma": ",", "semicolon": ";", "tab": "\t", "\\t": "\t", "space": " ", "pipe": "|"}


class Row(NamedTuple):
    """A line of a table: its number, and its cells without blanks around them."""

    line: int
    cells: list[str]

    @property
    def text(self) -> str:
        """The line as a message quotes it."""
        return repr(",".join(self.cells)[:60])


def is_table(path: Path) -> bool:
    """Tell by its name whether a path is that of a table of labels; a folder that is called so is none."""
    return path.suffix.lower() in TABLES and not path.is_dir()


def separator_of(text: str | None) -> str | None:
    """Return the character that an option names, such as ``tab``; None stays None.

    Raises:
        UsageError: it is not one character.
    """
    found = text if text is None else _NAMED.get(text.lower(), text)
    if found is not None and len(found) != 1:
        raise UsageError(f"{text!r} separates nothing; give comma, semicolon, tab, space, pipe, or one character")
    return found


def plain_head(text: str) -> str:
    """Return the name of a column as heads are compared."""
    return text.strip().lower().replace(" ", "_").replace("-", "_")


def read_rows(path: Path, separator: str | None = None) -> list[Row]:
    """Return all lines that are not blank; of a parquet file the first is made of its columns' names.

    Args:
        path: the table.
        separator: of columns; None to find it: the one by which the first line names a column of paths, else by which
            most lines begin with an image.

    Raises:
        DataError: the file is absent or damaged, no UTF-8 text, or has no lines.
        UnavailableError: a parquet file, and pyarrow is not installed.
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
    """Tell whether a cell ends as the name of an image does."""
    return os.path.splitext(cell)[1].lower() in SUFFIXES


def is_image_of(root: Path, cell: str) -> bool:
    """Tell whether a cell is the path of an image: by its ending, or because there is such a file."""
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
        except DataError:  # other quotes than those of this separator
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
    with reading(path, "cannot be read as a parquet file"), parquet.ParquetFile(path) as file:
        if file.metadata.num_rows * max(file.metadata.num_columns, 1) > _MOST_CELLS:
            raise DataError(f"{path} has {file.metadata.num_rows:,} rows; a table of labels has fewer")
        table = file.read()
        columns = [column.to_pylist() for column in table.columns]
    for name, values in zip(table.column_names, columns, strict=True):
        if any(isinstance(value, (dict, bytes)) for value in values[:100]):
            raise DataError(f"{path}: its column {name} holds no text or numbers; give one of paths")
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
    """Return the names of the columns, if the first line names one of paths; None where it is an image already.

    Raises:
        DataError: it is neither.
    """
    heads = [plain_head(cell) for cell in rows[0].cells]
    if len(heads) > 1 and any(head in PATHS for head in heads) and not any(map(is_called_image, rows[0].cells)):
        return heads
    if is_image_of(table.parent, rows[0].cells[0]):
        return None
    raise DataError(
        f"{table} line {rows[0].line} is {rows[0].text}: neither an image and its label nor names of columns that are "
        "known; name them path,label or path,label,split"
    )
