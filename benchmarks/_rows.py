"""Rows of benchmark results: appended to a CSV file, each with where, when and by which code it was measured."""

import csv
import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

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

    name = cpu_name() if device == "cpu" else torch.cuda.get_device_name()
    git = ["git", "-C", str(REPO)]
    sha = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    dirty = subprocess.run(
        [*git, "status", "--porcelain", "--", "vtk", "kernels", "export", "benchmarks/*.py"],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    return {
        "device": name,
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": version("torch"),
        "timm": version("timm"),
        "git": (sha.strip() or "unknown") + ("+changes" if dirty.strip() else ""),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row; a file with other columns is refused rather than mixed.

    Raises:
        SystemExit: the columns differ.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(row)
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            found = next(csv.reader(file), columns)
        if found != columns:
            sys.exit(f"{path} has columns {', '.join(found)}; this benchmark writes {', '.join(columns)}: move it away")
    new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def require_green(tests: Sequence[str]) -> None:
    """Run the tests of what is measured: a number of broken code is worth nothing.

    Raises:
        SystemExit: a test fails.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", *(str(REPO / t) for t in tests)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout[-3000:]}\nthe tests of what is measured fail; nothing was measured")
