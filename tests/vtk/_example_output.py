"""Recorded output of the examples: runs a script, records what it prints, and compares a later run with the record.

Usage: python tests/vtk/_example_output.py --write [NAME …]   (in the repository root)
"""

import os
import re
import subprocess
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
JOBS = ("finetune_export", "many_tasks", "why")
"""Examples of one job each: short scripts of public names."""

RECORDED = (*JOBS, "segmentation_upernet", "vilt_context_broadcast")
"""Examples whose whole output is in ``output.txt``."""

VARIES = (
    r", best so far",  # which epochs are the best so far hangs on the last digits of their scores
    r"(?<=best epoch )\d+",
    r"(?<=\.png: )\w+",  # a predicted label
    r"(?<= px: )\w+(, \w+)*",
)
"""What a run on another processor may print differently."""

PROGRESS = re.compile(r"^.*, \d+ s left\b.*\n", re.M)
"""Lines that a slow machine prints within an epoch or a measurement."""

NUMBER = re.compile(r"[-−+]?\d[\d,]*(?:\.\d+)?(?:e[-−]\d+)?(?: ?(?:%|points|ms|s|images/s|MB|GB)(?!\w))?")
SPEED = ("ms", "s", "images/s", "MB", "GB")  # of the machine and of what else it does


def run(name: str, folder: Path) -> str:
    """Run an example in an empty folder and return what it prints on stdout."""
    env = os.environ | {"VTK_HOME": str(folder / "home")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name / "main.py")], capture_output=True, text=True, timeout=600, check=False,
        cwd=folder, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return PROGRESS.sub("", done.stdout)


def differences(recorded: str, printed: str) -> list[str]:
    """Return where two outputs differ by more than another processor explains; empty if they agree."""
    texts = [_plain(recorded), _plain(printed)]
    for before, after in zip_longest(*(NUMBER.sub("#", text).split() for text in texts), fillvalue="nothing"):
        if before != after:
            return [f"`{before}` was recorded, `{after}` printed"]
    pairs = zip(*(NUMBER.findall(text) for text in texts), strict=True)
    return [f"{before} was recorded, {after} printed" for before, after in pairs if not _near(before, after)]


def _plain(text: str) -> str:
    text = " ".join(PROGRESS.sub("", text).split())
    for pattern in VARIES:
        text = re.sub(pattern, "", text)
    return text


def _near(before: str, after: str) -> bool:
    """Compare two numbers: counts exactly, scores and losses loosely, errors by their size, times not at all."""
    number = re.compile(r"[-−+]?[\d,.]+(?:e[-−]\d+)?")
    unit = number.sub("", before, count=1).strip()
    if unit != number.sub("", after, count=1).strip():
        return False
    if unit in SPEED:
        return True
    was, now = (float(number.match(text)[0].replace(",", "").replace("−", "-")) for text in (before, after))  # type: ignore[index]
    if unit in ("%", "points"):
        return abs(was - now) <= 12.0
    if "e" in before or "e" in after:
        return abs(now) <= 100 * abs(was)
    if "." in before or "." in after:
        return abs(was - now) <= max(0.5, 0.5 * abs(was))
    return was == now


def main() -> None:
    """Record the examples again."""
    flag, *names = sys.argv[1:] or [""]
    if flag != "--write":
        raise SystemExit(__doc__)
    for name in names or RECORDED:
        with tempfile.TemporaryDirectory() as folder:
            (EXAMPLES / name / "output.txt").write_text(run(name, Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
