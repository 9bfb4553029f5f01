"""``python -m tests.fuzz --files 20000``: damage files, read them, and say which end in anything but one line.

Each reader runs in a process of its own. The damage of a file follows from the reader's name and the file's number, so
``--only READER --first NUMBER --files 1 --keep FOLDER`` makes one again.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.child import MEMORY, SECONDS
from tests.fuzz.readers import READERS

REPO = Path(__file__).resolve().parents[2]
_GIVE_UP = 20
"""After so many files of one reader that end its process the rest is left."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--files", type=int, default=2000, help="in all; shared out as READERS says")
    parser.add_argument("--only", nargs="+", choices=sorted(READERS), default=sorted(READERS))
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--keep", type=Path, help="folder for the files that are not read well")
    options = parser.parse_args()
    shares = {name: READERS[name].share for name in options.only}
    count, faults, start = 0, [], time.monotonic()
    for name, share in shares.items():
        files = max(1, round(options.files * share / sum(shares.values())))
        before = time.monotonic()
        found = fuzz(name, options.first, files, options.keep)
        count, faults = count + files, faults + found
        print(f"{name}: {files} files, {len(found)} faults, {time.monotonic() - before:.0f} s", flush=True)
        for fault in found:
            print(f"  {fault['number']} {fault['file']}: {fault['fault'].strip().splitlines()[-1][:200]}", flush=True)
    bounds = f"address space {MEMORY >> 20} MiB above that of the loaded libraries, alarm {SECONDS} s"
    print(f"{count} files, {len(faults)} faults, {time.monotonic() - start:.0f} s; {bounds}")
    return 1 if faults else 0


def fuzz(name: str, first: int, count: int, keep: Path | None = None) -> list[dict[str, object]]:
    """Return the files of a reader that are not read well: number, name and traceback."""
    faults: list[dict[str, object]] = []
    end, died = first + count, 0
    with tempfile.TemporaryDirectory(prefix="vtk-fuzz-") as folder:
        work = Path(folder)
        while first < end and died < _GIVE_UP:
            (work / "at").write_text(str(first))
            run = subprocess.run(
                [sys.executable, "-m", "tests.fuzz.child", name, str(first), str(end - first), str(work)],
                cwd=REPO,
                capture_output=True,
                text=True,
                check=False,
            )
            faults += [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
            at = int((work / "at").read_text())
            if run.returncode:
                died += 1
                faults.append(
                    {
                        "reader": name,
                        "number": at,
                        "file": "?",
                        "fault": f"{run.stderr[-3000:]}\nended with {run.returncode}",
                    }
                )
                at += 1
            first = at
        if keep is not None and faults:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"{name}.json").write_text(json.dumps(faults, indent=1))
            if (work / "kept").is_dir():
                shutil.copytree(work / "kept", keep / name, dirs_exist_ok=True)
    return faults


if __name__ == "__main__":
    sys.exit(main())
