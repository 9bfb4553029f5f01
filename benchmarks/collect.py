"""Takes the rows of a run into ``benchmarks/results``, behind those of earlier runs, which documents then call stale.

Rows that are there already are not taken twice. Columns that one of both lacks are empty.

    python benchmarks/collect.py DIR
"""

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import _rows

MEASURED = ("device", "torch", "git", "date")
"""Columns of every row of a run; what has not all of them is another kind of file."""


def joined(old: Sequence[dict[str, str]], new: Sequence[dict[str, str]]) -> tuple[str, int]:
    """Return the text of a file with the rows of both, and how many of the new ones it did not have."""
    columns = list(dict.fromkeys(name for rows in (old, new) for row in rows[:1] for name in row))
    full = [{name: row.get(name) or "" for name in columns} for row in (*old, *new)]
    rows = list({tuple(row.values()): row for row in full}.values())
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue(), len(rows) - len({tuple(row.values()) for row in full[: len(old)]})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what `gpu.sh --out` named")
    parser.add_argument("--results", type=Path, default=_rows.RESULTS)
    args = parser.parse_args(argv)
    files = sorted(args.folder.glob("gpu_*.csv"))
    if not files:
        print(
            f"collect.py: {args.folder} holds no gpu_*.csv; give the folder that `gpu.sh --out` named", file=sys.stderr
        )
        return 1
    for file in files:
        rows = _rows.read(file)
        if odd := next((row for row in rows if None in row or any(not row.get(name) for name in MEASURED)), None):
            print(f"collect.py: {file} has a row that is not whole or of no run, {odd}; nothing of it was taken",
                  file=sys.stderr)  # fmt: skip
            return 1
    for file in files:
        path = args.results / file.name
        text, count = joined(_rows.read(path), _rows.read(file))
        _rows.replace(path, text)
        print(f"{path.name}: {count} new rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
