"""Digests of the code that a row timed, by which a row knows when it is older than its kernels.

A row of an operation is about the operation's file, what its benchmark calls beside it, and all that these import of
`vtk_kernels`; a row of a whole model about all kernels and ``vtk/fused``. What chooses between implementations is left
out: rows say which one they timed. New rows carry the digest. For older ones `record` works it out from the history
and keeps it in ``results/code.csv``, so that documents need no history.
"""

import csv
import functools
import hashlib
import io
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import _rows

FILE = "code.csv"
MODELS = "fused"
"""The subject of whole models."""

KERNELS, FUSED = "kernels/vtk_kernels", "vtk/fused"
NOT_TIMED = {"choices", "_choice_tables", "_nearest", "launches", "support", "__init__"}
"""Modules of `vtk_kernels` that run before anything is timed."""

LIBRARY = ("eager", "grouped_mm", "compile", "timm")
"""Beginnings of providers that run nothing of ours."""

TIMED = ("gpu_kernels.csv", "gpu_e2e.csv", "gpu_breakdown.csv", "gpu_correct.csv")
"""Result files whose rows are about code of ours on a GPU."""

Files = Callable[[str], Mapping[str, bytes]]
"""Folder to the Python files in it, by their paths from the repository's root; and a file's path to itself."""


def tree(root: Path = _rows.REPO) -> Files:
    """Return the files as they are."""

    def files(place: str) -> dict[str, bytes]:
        path = root / place
        found = [path] if path.is_file() else sorted(path.glob("*.py"))
        return {file.relative_to(root).as_posix(): file.read_bytes() for file in found}

    return files


def commit(git: str, root: Path = _rows.REPO) -> Files | None:
    """Return the files of a commit, None if the history does not have it."""

    def run(*args: str) -> bytes | None:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, check=False)
        return None if done.returncode else done.stdout

    if not re.fullmatch("[0-9a-f]{7,40}", git) or run("cat-file", "-e", f"{git}^{{commit}}") is None:
        return None

    def files(place: str) -> dict[str, bytes]:
        folder = "" if place.endswith(".py") else "/"
        names = (run("ls-tree", "--name-only", git, place + folder) or b"").decode().split()
        return {name: run("show", f"{git}:{name}") or b"" for name in names if name.endswith(".py")}

    return files


def digest(subject: str, files: Files) -> str:
    """Return a digest of the code that a subject's rows time.

    Args:
        subject: an operation, or `MODELS`.
        files: where to read.
    """
    kernels = {Path(path).stem: data for path, data in files(KERNELS).items()}
    taken = {name: kernels[name] for name in _closure(_seeds(subject, files), kernels)}
    if subject == MODELS or subject not in kernels:
        taken = {name: data for name, data in kernels.items() if name not in NOT_TIMED}
    if subject == MODELS:
        taken |= files(FUSED)
    made = hashlib.sha256()
    for name in sorted(taken):
        made.update(f"{name} {len(taken[name])}\n".encode() + taken[name])
    return made.hexdigest()[:12]


def _seeds(subject: str, files: Files) -> set[str]:
    bench = files(f"benchmarks/bench_{subject}.py").values()
    return {subject}.union(*(_imports(data) for data in bench))


def _imports(data: bytes) -> set[str]:
    """Return the modules of `vtk_kernels` that a file imports."""
    text = data.decode("utf-8", "replace")
    found = set(re.findall(r"^\s*(?:from|import) vtk_kernels\.(\w+)", text, re.M))
    for names in re.findall(r"^\s*from vtk_kernels import \(?([\w, \n]+)", text, re.M):
        found |= set(re.findall(r"\w+", names))
    return found


def _closure(seeds: Iterable[str], kernels: Mapping[str, bytes]) -> set[str]:
    found: set[str] = set()
    waiting = set(seeds)
    while waiting:
        name = waiting.pop()
        if name in kernels and name not in found | NOT_TIMED:
            found.add(name)
            waiting |= _imports(kernels[name])
    return found


@functools.cache
def current(subject: str) -> str:
    """Return the digest of the code as it is now."""
    return digest(subject, tree())


def subject_of(file: str, row: Mapping[str, str]) -> str | None:
    """Return what a row of a result file times or checks of ours; None where that is a library's, or the device."""
    if row.get("provider", "").startswith(LIBRARY):
        return None
    if file == "gpu_kernels.csv":
        return row["op"]
    if file == "gpu_correct.csv" and row["unit"].startswith("op "):
        return row["unit"].removeprefix("op ")
    if file == "gpu_correct.csv" and not row["unit"].startswith("model "):
        return None
    return MODELS if file in TIMED else None


def recorded(results: Path) -> dict[tuple[str, str], str]:
    """Return the digest of each commit and subject that is on record."""
    return {(row["git"], row["subject"]): row["digest"] for row in _rows.read(results / FILE)}


def record(results: Path, of: Callable[[str], Files | None] = commit) -> None:
    """Write down the digests of the commits that rows name, where the history has them and they are not yet there."""
    known = recorded(results)
    owed: dict[str, set[str]] = {}
    for file in TIMED:
        for row in _rows.read(results / file):
            subject = subject_of(file, row)
            if subject and not row.get("code") and (row["git"], subject) not in known:
                owed.setdefault(row["git"], set()).add(subject)
    for git, subjects in owed.items():
        if (files := of(git)) is not None:
            files = functools.cache(files)
            known |= {(git, subject): digest(subject, files) for subject in subjects}
    if not known:
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("git", "subject", "digest"))
    writer.writerows((*key, known[key]) for key in sorted(known))
    _rows.replace(results / FILE, text.getvalue())


def state_of(
    file: str, row: Mapping[str, str], known: Mapping[tuple[str, str], str], now: Callable[[str], str] = current
) -> str:
    """Return "" for a row of today's code or of none of ours, "stale", or "of unknown code"."""
    subject = subject_of(file, row)
    if subject is None:
        return ""
    then = row.get("code") or known.get((row["git"], subject))
    return "of unknown code" if then is None else "" if then == now(subject) else "stale"
