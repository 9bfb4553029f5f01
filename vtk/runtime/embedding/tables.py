"""Writes a table of embeddings row by row, so that it need not fit into memory: .parquet, .npz or .csv.

=========  ========================================================================================
suffix     contents
=========  ========================================================================================
.parquet   columns ``path``, ``label`` (strings) and ``embedding`` (a list of fp32 of fixed length)
.npz       arrays ``path``, ``label`` (N,) of text and ``embedding`` (N, C) fp32, for `numpy.load`
.csv       columns ``path``, ``label``, ``e0`` … ``eN``; nine digits, which give the same fp32
=========  ========================================================================================
"""

import contextlib
import csv
import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from vtk.errors import DataError
from vtk.files import replace_file
from vtk.nodes import check_file

Rows = np.ndarray[Any, np.dtype[np.float32]]
ABOUT = "vtk"
"""Key of the facts in the metadata of a .parquet, and name of their array in an .npz."""
_GROUP = 1 << 22
"""Numbers of a row group of a .parquet: 16 MiB, which are in memory until they are written."""
_NAMES = 1 << 14
_CSV = re.compile(rb"path(,label)?,e0(,e1)?")


class Table(Protocol):
    """A table that is being written."""

    def add(self, paths: Sequence[str], labels: Sequence[str | None], rows: Rows) -> None:
        """Append rows; ``labels`` are left out of a table without that column."""
        ...

    def finish(self) -> None:
        """Write what is left; called once, after the last row."""
        ...


@contextlib.contextmanager
def open_table(out: Path, width: int, *, labelled: bool, about: Mapping[str, Any]) -> Iterator[Table]:
    """Return a context with a table, which takes the place of ``out`` at its end, or is removed on an error.

    Args:
        out: the file.
        width: numbers of a row.
        labelled: whether there is a column of labels.
        about: facts on the rows, as plain JSON values; a .csv has no place for them.

    Raises:
        DataError: the file cannot be written, or the disk is full.
    """
    facts = json.dumps(dict(about))
    with replace_file(out) as tmp, contextlib.ExitStack() as stack:
        table: Table
        if out.suffix.lower() == ".parquet":
            table = ParquetTable(stack, tmp, width, labelled, facts)
        elif out.suffix.lower() == ".npz":
            table = NumpyTable(stack, tmp, width, labelled, facts)
        else:
            table = CsvTable(stack, tmp, width, labelled)
        yield table
        table.finish()


class ParquetTable:
    """Row groups of a bounded size, through pyarrow."""

    def __init__(self, stack: contextlib.ExitStack, path: Path, width: int, labelled: bool, facts: str) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        columns = [("path", pa.string()), *([("label", pa.string())] if labelled else [])]
        self.schema = pa.schema([*columns, ("embedding", pa.list_(pa.float32(), width))], {ABOUT: facts})
        self.file = stack.enter_context(parquet.ParquetWriter(path, self.schema, use_dictionary=["label"]))
        self.most = max(_GROUP // width, 1)
        self._empty()

    def _empty(self) -> None:
        self.paths: list[str] = []
        self.labels: list[str | None] = []
        self.rows: list[Rows] = []

    def add(self, paths: Sequence[str], labels: Sequence[str | None], rows: Rows) -> None:
        """Collect rows until they fill a row group."""
        self.paths += map(utf8, paths)
        self.labels += [None if label is None else utf8(label) for label in labels]
        self.rows.append(rows)
        if len(self.paths) >= self.most:
            self.finish()

    def finish(self) -> None:
        """Write a row group."""
        import pyarrow as pa

        if not self.paths:
            return
        flat = pa.array(np.concatenate(self.rows).reshape(-1))
        columns = [pa.array(self.paths, pa.string())]
        if "label" in self.schema.names:
            columns.append(pa.array(self.labels, pa.string()))
        columns.append(pa.FixedSizeListArray.from_arrays(flat, type=self.schema.field("embedding").type))
        self.file.write_table(pa.Table.from_arrays(columns, schema=self.schema))
        self._empty()


class NumpyTable:
    """Rows and names are collected in unnamed files beside the table: an array's shape stands before its numbers."""

    def __init__(self, stack: contextlib.ExitStack, path: Path, width: int, labelled: bool, facts: str) -> None:
        self.path, self.width, self.facts, self.count = path, width, facts, 0
        self.names = ("path", "label") if labelled else ("path",)
        open_file = lambda: stack.enter_context(tempfile.TemporaryFile(dir=path.parent))  # noqa: E731
        self.numbers: IO[bytes] = open_file()
        self.texts: dict[str, IO[bytes]] = {name: open_file() for name in self.names}
        self.longest = dict.fromkeys(self.names, 1)

    def add(self, paths: Sequence[str], labels: Sequence[str | None], rows: Rows) -> None:
        """Append to the files."""
        for name, texts in zip(self.names, (paths, [label or "" for label in labels]), strict=False):
            self.texts[name].writelines(json.dumps(text).encode() + b"\n" for text in texts)
            self.longest[name] = max(self.longest[name], *map(len, texts))
        self.numbers.write(np.ascontiguousarray(rows, "<f4").tobytes())
        self.count += len(rows)

    def finish(self) -> None:
        """Write the archive."""
        with zipfile.ZipFile(self.path, "w", zipfile.ZIP_STORED) as archive:
            for name in self.names:
                kind = np.dtype(f"<U{self.longest[name]}")
                with _member(archive, name, kind, (self.count,)) as file:
                    self.texts[name].seek(0)
                    while lines := self.texts[name].readlines(_NAMES):
                        file.write(np.array([json.loads(line) for line in lines], kind).tobytes())
            with _member(archive, "embedding", np.dtype("<f4"), (self.count, self.width)) as file:
                self.numbers.seek(0)
                shutil.copyfileobj(self.numbers, file, 1 << 20)
            facts = np.array(self.facts)
            with _member(archive, ABOUT, facts.dtype, ()) as file:
                file.write(facts.tobytes())


@contextlib.contextmanager
def _member(archive: zipfile.ZipFile, name: str, kind: np.dtype, shape: tuple[int, ...]) -> Iterator[IO[bytes]]:
    """Open an array of an archive for writing its numbers."""
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        yield file


class CsvTable:
    """A line for each image."""

    def __init__(self, stack: contextlib.ExitStack, path: Path, width: int, labelled: bool) -> None:
        file = path.open("w", newline="", encoding="utf-8", errors="surrogateescape")
        self.writer = csv.writer(stack.enter_context(file), lineterminator="\n")
        self.labelled = labelled
        self.writer.writerow(["path", *(["label"] if labelled else []), *(f"e{i}" for i in range(width))])

    def add(self, paths: Sequence[str], labels: Sequence[str | None], rows: Rows) -> None:
        """Write the lines."""
        for i, (path, row) in enumerate(zip(paths, rows.tolist(), strict=True)):
            label = [labels[i] or ""] if self.labelled else []
            self.writer.writerow([path, *label, *(f"{number:.9g}" for number in row)])

    def finish(self) -> None:
        """Do nothing: every line is written."""


def utf8(text: str) -> str:
    """Return a text that Arrow can hold: bytes of a file name that are no UTF-8 are written as ``\\xNN``."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def check_out(out: Path, *, overwrite: bool) -> None:
    """Refuse to replace a file that is not a table of embeddings.

    Raises:
        DataError: it is not one and ``overwrite`` is False, or its place cannot be written.
    """
    check_file(out, example="embeddings.parquet")
    if out.is_file() and not overwrite and not _is_ours(out):
        raise DataError(f"`--out` {out} is not a table of embeddings; give another file, or --overwrite")


def _is_ours(path: Path) -> bool:
    try:
        if path.suffix.lower() == ".csv":
            with path.open("rb") as file:
                return _CSV.match(file.read(64)) is not None
        if path.suffix.lower() == ".npz":
            with zipfile.ZipFile(path) as archive:
                return {"path.npy", "embedding.npy", f"{ABOUT}.npy"} <= set(archive.namelist())
        from pyarrow import parquet

        schema = parquet.read_schema(path)
        return ABOUT.encode() in (schema.metadata or {}) and "embedding" in schema.names
    except Exception:  # damaged, or of another kind: somebody else's
        return False
