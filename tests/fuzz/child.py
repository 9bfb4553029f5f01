"""One reader and a stretch of damaged files, in a process with little memory and an alarm."""

import contextlib
import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import sys
import traceback
import warnings
from pathlib import Path
from types import FrameType

MEMORY = 2 << 30
"""Bytes of address space beyond what the process has once libraries are loaded and all whole files were read."""

SECONDS = 5
"""For a file."""


class Hang(BaseException):
    """A reader is not through after `SECONDS`; no reader may catch it."""


def run(name: str, first: int, count: int, work: Path) -> None:
    """Damage and read files ``first`` to ``first + count``, and print a JSON line for each that is not read well.

    The number of the file at hand stands in ``work/at``, for when the process dies of it; the file stays in
    ``work/case``.
    """
    import torch

    from tests.fuzz.readers import READERS

    torch.set_num_threads(1)
    reader, whole, case, kept = READERS[name], work / "whole", work / "case", work / "kept"
    os.environ.update(VTK_HOME=str(work / "home"), HF_HUB_OFFLINE="1", HF_HOME=str(work / "hf"))
    whole.mkdir(parents=True, exist_ok=True)
    reader.make(whole)
    targets = [
        (file, end)
        for file in sorted(whole.rglob("*"))
        if file.is_file()
        for end in reader.damage
        if file.name.endswith(end)
    ]
    # the first that fits, as they are listed
    chosen = {file: next(end for end in reader.damage if file.name.endswith(end)) for file, _ in targets}
    files = sorted(chosen)
    data = {file: file.read_bytes() for file in files}
    warnings.simplefilter("ignore")
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(whole, case)
    for file in files:  # what is imported and cached the first time takes its time
        _read(reader, case, case / file.relative_to(whole), seconds=0)
    _limit()
    with (work / "at").open("wb", buffering=0) as at:
        for number in range(first, first + count):
            at.seek(0)
            at.write(f"{number:<12}".encode())
            rng = random.Random(f"{name} {number}")
            file = rng.choice(files)
            mutate = rng.choice(reader.damage[chosen[file]])
            target = case / file.relative_to(whole)
            try:
                damaged = mutate(data[file], [data[f] for f in files if f.suffix == file.suffix], rng)
            except Exception:  # a structure that this damage does not fit
                damaged = data[file][: rng.randrange(len(data[file]))]
            target.write_bytes(damaged)
            fault = _read(reader, case, target)
            if fault:
                kept.mkdir(exist_ok=True)
                shutil.copyfile(target, kept / f"{number}-{target.name}")
                print(json.dumps({"reader": name, "number": number, "file": target.name, "fault": fault}), flush=True)
            if set(case.rglob("*")) != {case / f.relative_to(whole) for f in whole.rglob("*")}:
                shutil.rmtree(case, ignore_errors=True)  # a reader left something
                shutil.copytree(whole, case)
            target.write_bytes(data[file])
        at.seek(0)
        at.write(f"{first + count:<12}".encode())


def _read(reader, case: Path, target: Path, seconds: int = SECONDS) -> str:  # type: ignore[no-untyped-def]
    """Return what is wrong with how a file was read; nothing where it was read, or refused in one line."""
    from tests.fuzz.reader import check_line
    from vtk.errors import VtkError

    if seconds:
        faulthandler.dump_traceback_later(seconds + 3, exit=True)  # of C code that no signal stops
    signal.alarm(seconds)
    try:
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
            reader.read(case, target)
        return ""
    except VtkError as error:
        try:
            check_line(error)
        except AssertionError as wrong:
            return str(wrong)
        return ""
    except Hang:
        return f"hang\n{traceback.format_exc()}"
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()


def _limit() -> None:
    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, ring)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
