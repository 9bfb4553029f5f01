"""Units of the stage ``correct`` in processes of their own, side by side, and the tests that need a GPU."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import _rows
from _store import Deadline, Store

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


@dataclass(frozen=True)
class GpuTests:
    """``pytest -m gpu`` on the kernels and the fused models, as one row, if enough time is left."""

    store: Store
    deadline: Deadline
    failure: Failure
    folders: tuple[str, ...] = ("tests/kernels", "tests/vtk/fused")

    def run(self) -> None:
        """Run them; a time-out is no failure, it is missing."""
        key: Key = ("pytest -m gpu", " ".join(self.folders), "")
        if self.store.has(unit=key[0], case=key[1], dtype=key[2]) or not self.deadline.allows(20, key[0]):
            return
        paths = [str(_rows.REPO / f) for f in self.folders if (_rows.REPO / f).is_dir()]
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--no-header", "-p", "no:cacheprovider", *paths]
        try:
            done = subprocess.run(
                command, cwd=_rows.REPO, capture_output=True, text=True, timeout=self.deadline.left, check=False
            )
        except subprocess.TimeoutExpired:
            self.deadline.missing.append(key[0])
            return
        note = (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]
        passed = done.returncode in (0, 5)  # 5: no test is marked gpu
        if not passed:
            print(done.stdout[-3000:], flush=True)
        self.store.add(self.failure(key, note) | {"passed": passed})
