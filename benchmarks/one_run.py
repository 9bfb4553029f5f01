"""``gpu.sh all``: every stage in one call that ends in time, continues when it is called again, and sums up.

Each step of `_plan` runs in a process of its own, in a group that is ended with it. One whose process died, or whose
row hangs, is started again without that row while its time lasts. What ``choices.json`` says after a step is what the
next ones run with.

    benchmarks/gpu.sh all --out DIR [--seconds 540]
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import _attempts
import _plan
import _rows
import summary
from _plan import STEPS, Outcome, Step

GRACE = 4.0
"""Seconds before its end that a stage is told to stop."""

PATIENCE = 2.0
"""Seconds from a polite end to a hard one."""

RESTARTS = 6
CHOICES = "choices.json"
PROGRESS = "progress.json"
HERE = Path(__file__).resolve().parent


class Progress:
    """Which steps are complete, by this code on this card."""

    def __init__(self, out: Path, smoke: bool) -> None:
        self.path = out / PROGRESS
        self.code = {"git": _rows.code_version(), "device": _card(), "smoke": str(smoke)}
        self.code |= {name: _version(name) for name in ("torch", "triton", "timm")}
        self.complete: list[str] = []
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found["code"] == self.code:
                kept = [step for step in STEPS if step.name in found["complete"] and _wrote(step, out)]
                self.complete = [step.name for step in kept]

    def add(self, step: Step) -> None:
        """Note that a step is complete."""
        self.complete.append(step.name)
        text = json.dumps({"code": self.code, "complete": self.complete}, indent=1)
        with contextlib.suppress(OSError):  # it is only run again
            _rows.replace(self.path, text + "\n")


def _wrote(step: Step, out: Path) -> bool:
    """Whether what a step wrote is still there, and whole."""
    files = [out / f"{kind}_{step.stage}.csv" for kind in ("gpu", "smoke")]
    return any(file.exists() for file in files) and all(_rows.whole(file) for file in files if file.exists())


def put_aside(out: Path) -> None:
    """Rename choices that cannot be read, with which nothing could run; the steps that made them make them again."""
    path = out / CHOICES
    if not path.exists():
        return
    try:
        if isinstance(json.loads(path.read_text(encoding="utf-8"))["measured"], list):
            return
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    with contextlib.suppress(OSError):
        os.replace(path, out / f"{CHOICES}.old")
        (out / PROGRESS).unlink(missing_ok=True)
        print(f"{path} was damaged, and is {CHOICES}.old now", flush=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _card() -> str:
    with contextlib.suppress(OSError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def has_card() -> bool:
    """Return whether torch can measure a CUDA device here; it is asked only where the driver names none."""
    asks = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return (
        bool(_card()) or subprocess.run([sys.executable, "-c", asks], capture_output=True, check=False).returncode == 0
    )


def environment(out: Path) -> dict[str, str]:
    """Return the environment of a step: with the choices that the steps before it measured."""
    found = {**os.environ, "PYTHONUNBUFFERED": "1", _attempts.RUN: os.environ.get(_attempts.RUN) or str(time.time_ns())}
    os.environ[_attempts.RUN] = found[_attempts.RUN]
    if (out / CHOICES).exists():
        found["VTK_CHOICES"] = str((out / CHOICES).resolve())
    return found


def command_of(step: Step, out: Path, seconds: float, smoke: bool) -> list[str]:
    """Return the command of a step that may take so many seconds, its start and its end included."""
    told = max(1.0, seconds - _plan.START - GRACE) if not smoke else seconds
    script = str(HERE / f"{step.stage}.py")
    more = ("--smoke", *step.smoke) if smoke else ()
    return [sys.executable, script, "--out", str(out), "--seconds", f"{told:.0f}", *step.args, *more]


def supervise(command: Sequence[str], env: dict[str, str], note: Path, seconds: float) -> int:
    """Run a command for so many seconds at most, or until its row takes longer than the row may.

    Returns:
        Its exit code; 124 if it was ended here.
    """
    # file descriptors stay open: one of them is the lock of the folder, which holds as long as anybody writes there
    process = subprocess.Popen(command, env=env, start_new_session=True, close_fds=False)
    end, started = time.monotonic() + seconds, time.time()
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(0.1)
            began = _attempts.limit_of(note)
            # a note from before is what the last process died of
            hangs = began is not None and began[0] >= started and time.time() > sum(began)
            if hangs or time.monotonic() > end:
                return 124
    finally:
        if process.poll() is None:
            for sign, patience in ((signal.SIGTERM, PATIENCE), (signal.SIGKILL, 5.0)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, sign)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience)
                    break


def launcher(out: Path, smoke: bool, progress: Progress) -> Callable[[Step, float], int]:
    """Return what runs a step, again where a row ended its process."""

    def launch(step: Step, seconds: float) -> int:
        print(f"== {step.name}, at most {seconds:.0f} s", flush=True)
        end, note, code = time.monotonic() + seconds, _attempts.note_of(out, step.stage), 3
        for _ in range(RESTARTS):
            left = end - time.monotonic()
            code = supervise(command_of(step, out, left, smoke), environment(out), note, left)
            if code in (0, 1, 3) or not note.exists() or end - time.monotonic() < _plan.START + GRACE:
                break
            print(f"== {step.name}: its process ended with {code}; again without that row", flush=True)
        if code == 0:
            progress.add(step)
        elif code not in (1, 3):
            print(f"== {step.name} ended with {code}", flush=True)
        return code

    return launch


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=_plan.TOTAL)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended too
    if not args.smoke and not has_card():
        print("gpu.sh: `all` measures a CUDA device and none is here; --smoke tries it on the CPU", file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    put_aside(args.out)
    progress = Progress(args.out, args.smoke)
    outcomes: list[Outcome] = []
    try:
        outcomes = _plan.run_plan(
            STEPS, args.seconds, launcher(args.out, args.smoke, progress), time.monotonic,
            lambda step: step.name in progress.complete, least=1.0 if args.smoke else None,
        )  # fmt: skip
    finally:
        text = "\n".join(summary.lines(args.out, outcomes, args.smoke))
        with contextlib.suppress(OSError):
            _rows.replace(args.out / summary.FILE, text + "\n")
        with contextlib.suppress(OSError):  # of a pipe whose reader was interrupted too
            print(text, flush=True)
    return _plan.exit_code(outcomes)


if __name__ == "__main__":
    sys.exit(main())
