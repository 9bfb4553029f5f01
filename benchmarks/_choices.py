"""Measured rows as a choice table: which implementation is the quickest, in the form of `vtk_kernels.choices`.

Only times inside a CUDA graph decide: launched one by one, small shapes take the host's time and not the kernels'.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import _rows
from _runner import DTYPES, Bench

from vtk_kernels import choices

Entry = dict[str, Any]


def entries(benches: Mapping[str, Bench], rows: Iterable[Mapping[str, str]], red: Collection[str] = ()) -> list[Entry]:
    """Return one entry per shape that was measured for every answer its operation may give there.

    The entry also holds the medians it was decided by, in microseconds.

    Args:
        benches: by operation.
        rows: of the stage ``kernels``; of operations that are no more, or without a choice, they are passed over.
        red: operations whose comparisons fail: they decide nothing.
    """
    times: dict[tuple[Any, ...], dict[str, float]] = {}
    wanted: dict[tuple[Any, ...], set[str]] = {}
    for row in rows:
        bench = benches.get(row["op"])
        if bench is None or row["op"] in red or row["op"] not in choices.ALLOWED:
            continue
        answer = bench.answers.get(row["provider"])
        case = next((c for c in bench.cases if (c.label, c.mode) == (row["shape"], row["mode"])), None)
        shape = bench.choice(case) if case and case.mode == "forward" else None
        if answer is None or shape is None or row.get("passed") != "True" or row.get("timer") != "graph":
            continue
        dtype = str(DTYPES[row["dtype"]]).removeprefix("torch.")
        key = (row["device"], _minor(row["torch"]), _minor(row["triton"]), row["op"], dtype, *shape)
        wanted[key] = {bench.answers[name] for name in bench.deciding(case)} if case else set()
        found = times.setdefault(key, {})
        found[answer] = min(found.get(answer, float("inf")), float(row["p50_us"]))
    return [
        {**dict(zip(choices.FIELDS, key, strict=True)), "choice": min(us, key=us.__getitem__), "us": us}
        for key, us in times.items() if us.keys() == wanted[key]
    ]  # fmt: skip


def write(path: Path, found: Iterable[Entry]) -> None:
    """Write the package's own table with ``found`` in place of what it says about the same shapes."""
    own = choices.read(Path(choices.__file__).with_name("choices.json"))
    table = {tuple(entry[field] for field in choices.FIELDS): entry for entry in (*own, *found)}
    _rows.replace(path, choices.text(table.values()))


def drop(path: Path, red: Collection[str]) -> None:
    """Write a choice table again without what it says about operations whose comparisons fail."""
    write(path, [entry for entry in choices.read(path) if entry["op"] not in red])


def keep(failed: list[str], write: Callable[[], None]) -> None:
    """Write a choice table; what goes wrong is noted in ``failed``, and the rows measured are not lost for it."""
    try:
        write()
    except Exception as error:
        note = f"choices.json: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if note not in failed:
            failed.append(note)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
