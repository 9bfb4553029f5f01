"""Rows that may end their process: each is recorded before it starts, so the next process skips one that crashed.

A kernel that reads where it must not breaks the CUDA context of its process: no later row of it could be measured.
The stage then ends with `POISONED` and is started again; one that crashed or hung is started again as well. A row is
tried once in a run of `gpu.sh`, and after two deaths by the same code no more.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import _rows

POISONED = 4
"""Exit code of a stage whose CUDA context is broken."""

MOST = 2
"""Deaths after which a row is given up, until the code changes."""

RUN = "VTK_RUN"
"""Environment variable that names one call of `gpu.sh`."""


def note_of(out: Path, stage: str) -> Path:
    """Return the file that says which row a stage is at."""
    return out / f".{stage}.row"


def limit_of(note: Path) -> tuple[float, float] | None:
    """Return when the row that a note names began (seconds since 1970) and how long it may take; None without one."""
    try:
        return note.stat().st_mtime, float(json.loads(note.read_text(encoding="utf-8"))["limit"])
    except (OSError, ValueError, KeyError, TypeError):  # none, or half of one
        return None


class Attempts:
    """The rows of a stage that processes died of.

    Attributes:
        given_up: row to why it is not tried.
    """

    def __init__(self, out: Path, stage: str, git: str) -> None:
        self.note, self._git, self._stage = note_of(out, stage), git, stage
        self._run = os.environ.get(RUN, "")
        died = out / "died.csv"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            left = json.loads(self.note.read_text(encoding="utf-8"))
            _rows.append(died, {"stage": stage, "row": str(left["row"]), "run": str(left["run"]), "git": left["git"]})
        self.note.unlink(missing_ok=True)
        self.given_up: dict[str, str] = {}
        mine = [r for r in _rows.read(died) if (r["stage"], r["git"]) == (stage, git)]
        for row in dict.fromkeys(r["row"] for r in mine):
            runs = [r["run"] for r in mine if r["row"] == row]
            if self._run in runs or len(runs) >= MOST:
                times = "once" if len(runs) == 1 else f"{len(runs)} times"
                self.given_up[row] = f"{row}: its process died or hung, {times}; left out"

    @contextlib.contextmanager
    def row(self, name: str, limit: float) -> Iterator[None]:
        """Measure one row inside; who supervises the process ends it after ``limit`` seconds.

        Raises:
            SystemExit: what was raised inside left a CUDA context that nothing can be measured in.
        """
        note = json.dumps({"row": name, "limit": limit, "run": self._run, "git": self._git})
        with contextlib.suppress(OSError):  # of a full disk, which the row will meet
            self.note.write_text(note, encoding="utf-8")
        try:
            yield
        except Exception as error:
            if not device_lives():
                print(f"{self._stage}: {name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}; the CUDA "
                      "context is broken, so the stage starts again without this row", flush=True)  # fmt: skip
                raise SystemExit(POISONED) from error
            self.note.unlink(missing_ok=True)
            raise
        except BaseException:
            self.note.unlink(missing_ok=True)
            raise
        self.note.unlink(missing_ok=True)


def device_lives() -> bool:
    """Return whether this process can still use its CUDA device; True where it has none."""
    import torch

    if not torch.cuda.is_initialized():
        return True
    for _ in range(2):  # a capture that was broken off reports its error once more
        try:
            torch.cuda.synchronize()
            torch.zeros(1, device="cuda").add_(1)
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            return True
        except Exception:
            continue
        return True
    return False
