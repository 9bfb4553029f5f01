"""Units of the stage ``correct`` in processes of their own, side by side, and the tests that need a GPU."""

import json
import os
import subprocess
import sys
import time
from collections import Counter as Counts
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import _rows
from _store import Deadline

Key = tuple[str, str, str]
Failure = Callable[[Key, str], dict[str, object]]


def command_of(unit: str, rows: Path) -> list[str]:
    """Return the command that runs a unit and writes its rows, JSON, to a file."""
    script = str(Path(__file__).with_name("correct.py"))
    return [sys.executable, script, "--out", str(rows.parent), "--unit", unit, "--rows", str(rows)]


def run_units(
    owed: Mapping[str, Sequence[Key]], workers: int, deadline: Deadline, folder: Path,
    add: Callable[[dict[str, object]], None], failure: Failure, command: Callable[[str, Path], list[str]] = command_of,
) -> None:  # fmt: skip
    """Run ``command`` for each unit, ``workers`` at a time, and add their rows as they end.

    At the deadline what still runs is killed and noted as missing. A unit that dies leaves failed rows with the last
    line of what it said.
    """
    waiting = list(owed)
    running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
    while waiting or running:
        while waiting and len(running) < workers and deadline.left > 0:
            unit = waiting.pop(0)
            base = folder / str(len(waiting))
            with base.with_suffix(".log").open("wb") as log:
                process = subprocess.Popen(command(unit, base.with_suffix(".json")), stdout=log, stderr=log)
            running[unit] = process, base
        if deadline.left <= 0:
            for process, _ in running.values():
                process.kill()
                process.wait()
            deadline.missing.extend([*running, *waiting])
            return
        for unit, (process, base) in list(running.items()):
            if process.poll() is None:
                continue
            del running[unit]
            log = base.with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip()
            result = base.with_suffix(".json")
            if process.returncode == 0 and result.exists():
                rows = json.loads(result.read_text(encoding="utf-8"))
            else:
                last = log.splitlines()[-1] if log else "no output"
                rows = [failure(key, f"the process ended with {process.returncode}: {last}") for key in owed[unit]]
            for row in rows:
                add(row)
            bad = sum(not row["passed"] for row in rows)
            print(f"{unit}: {len(rows) - bad} of {len(rows)} passed", flush=True)
            if bad:
                print("\n".join(log.splitlines()[-12:]), flush=True)
        time.sleep(0.05)


TESTS = "pytest "
"""Beginning of the name of a unit that is a file of tests."""

ALONE = tuple(f"{TESTS}tests/{folder}/" for folder in ("benchmarks", "vtk/profiling"))
"""Beginnings of those that look at times: nothing may run beside them."""


def gpu_tests(tests: Path = _rows.REPO / "tests") -> list[str]:
    """Return a unit for each file of tests that needs a GPU, wherever it is."""
    files = (path for path in sorted(tests.rglob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8"))
    return [f"{TESTS}{path.relative_to(tests.parent).as_posix()}" for path in files]


def test_key(unit: str) -> Key:
    """Return the key of the one row of a file of tests."""
    return unit, "-m gpu", ""


def run_tests(unit: str, failure: Failure) -> dict[str, object]:
    """Run a file of tests in this process and return its row."""
    import pytest

    outcomes: Counts[str] = Counts()

    class Counter:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.outcome != "passed":
                outcomes[report.outcome] += 1

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                outcomes["failed to import"] += 1

    # our own modules' names are not those of the tests' imports
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]
    os.chdir(_rows.REPO)
    args = ["-m", "gpu", "-q", "--no-header", "-p", "no:cacheprovider", unit.removeprefix(TESTS)]
    code = pytest.main(args, plugins=[Counter()])
    note = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())) or "no test"
    return failure(test_key(unit), note) | {"passed": code in (0, 5)}  # 5: no test is marked gpu
