"""Rows of benchmark results: appended to a CSV file, each with where, when and by which code it was measured."""

import contextlib
import csv
import datetime
import functools
import io
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

REPO = Path(__file__).resolve().parents[1]
RESULTS = REPO / "benchmarks" / "results"


def cpu_name() -> str:
    """Return the CPU's model and the number of usable cores."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def context(device: str = "cpu") -> dict[str, str]:
    """Return the columns that every row carries."""
    import torch

    return {
        "device": cpu_name() if device == "cpu" else torch.cuda.get_device_name(),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": version("torch"),
        "timm": version("timm"),
        "git": code_version(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def kernel_context(device: str = "cpu") -> dict[str, str]:
    """Return `context` with the versions that a kernel's speed depends on: Triton's and the driver's."""
    return {**context(device), **_compiler_and_driver(device)}


@functools.cache
def code_version() -> str:
    """Return the commit, with ``+changes`` if what is measured differs from it.

    A copy of the tree without its history (a machine lent for a measurement) takes it from ``VTK_GIT``.
    """
    git = ["git", "-C", str(REPO)]
    sha = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    if not sha.strip():
        return os.environ.get("VTK_GIT", "").strip() or "unknown"
    dirty = subprocess.run(
        [*git, "status", "--porcelain", "--", "vtk", "kernels", "export", "benchmarks/*.py"],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    return sha.strip() + ("+changes" if dirty.strip() else "")


@functools.cache
def _compiler_and_driver(device: str) -> dict[str, str]:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "absent"
    driver = ""
    if device != "cpu":
        with contextlib.suppress(OSError):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
            driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {"triton": triton, "driver": driver}


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row; a file with other columns is refused rather than mixed. What a full disk cut is taken back.

    A file from before rows carried the digest ``code`` goes on without it.

    Raises:
        SystemExit: the columns differ, or the row cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(row)
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            found = next(csv.reader(file), columns)
        if found == [name for name in columns if name != "code"]:
            columns = found
            row = {name: row[name] for name in columns}
        if found != columns:
            sys.exit(f"{path} has columns {', '.join(found)}; this benchmark writes {', '.join(columns)}: move it away")
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if not path.exists():
        writer.writeheader()
    writer.writerow(row)
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            _write(file, text.getvalue().encode())
        except OSError as error:
            file.truncate(before)
            sys.exit(f"cannot write {path}: {error.strerror or error}; what was measured before is whole")


def _write(file: IO[bytes], data: bytes) -> None:
    """Write everything: to a disk that fills up, a call may write a part."""
    while data:
        data = data[file.write(data) :]
    os.fsync(file.fileno())


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all: what reads it sees the old one or the new one.

    Raises:
        OSError: it cannot be written; the old one is there still.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with tmp.open("wb", buffering=0) as file:
            _write(file, text.encode())
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, none if there is no file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def whole(path: Path) -> bool:
    """Return whether a CSV file can be read and no row of it was cut."""
    try:
        rows = read(path)
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            ends = file.read() == b"\n"
    except (OSError, UnicodeDecodeError, csv.Error):
        return False
    return ends and all(None not in (*row, *row.values()) for row in rows)


def require_green(tests: Sequence[str]) -> None:
    """Run the tests of what is measured: a number of broken code is worth nothing.

    Raises:
        SystemExit: a test fails.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", *(str(REPO / t) for t in tests)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout[-3000:]}\nthe tests of what is measured fail; nothing was measured")
