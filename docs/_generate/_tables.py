"""Rows of result files as tables of a document."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

Row = dict[str, str]
NOT_YET = "not yet measured"


def load(name: str, results: Path) -> list[Row]:
    """Return the rows of a result file, none if it is not there."""
    path = results / name
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def latest(rows: Iterable[Row], *key: str) -> list[Row]:
    """Return the last row of each key, in the order of first appearance."""
    return list({tuple(row[k] for k in key): row for row in rows}.values())


def where(rows: Sequence[Row]) -> str:
    """Say in one line how rows were measured."""

    def of(name: str) -> str:
        return ", ".join(dict.fromkeys(row[name] for row in rows if row.get(name)))

    parts = [of("device")]
    for label in ("threads", "torch", "triton", "timm", "driver"):
        if found := of(label):
            parts.append(f"{label} {found}")
    dates = sorted(row["date"] for row in rows)
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return "*" + "; ".join([*parts, f"commit {of('git')}", span]) + "*"


def table(head: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a table whose first ``left`` columns are words and the rest numbers."""
    rule = ["---"] * left + ["--:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))
