"""Summary page of a GPU run: each figure beside its prediction, its floor and its bound.

At most 60 lines of 80 columns; what no row says is "not measured", or "not yet". Rows of other commits do not count.

    python benchmarks/summary.py --out DIR
"""

import argparse
import contextlib
import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import _bounds
import _rows
from _bounds import COMPILED, FOLDED, FUSED, Row, Verdict
from _plan import Outcome

FILE = "summary.txt"
LINES, COLUMNS = 60, 80
NOT = "not measured"
CELLS = (
    ("S18x2", 224, 1), ("S/16", 224, 1), ("B/16", 224, 1), ("B18x2", 224, 1), ("S36x1", 224, 1), ("B36x1", 224, 1),
    ("B/16", 384, 1), ("S18x2", 224, 8), ("B/16", 224, 8), ("S18x2", 224, 64), ("B/16", 224, 64), ("B18x2", 224, 64),
    ("S18x2", 224, 256), ("B/16", 224, 256), ("B18x2", 224, 256),
)  # fmt: skip
"""Model, px and batch of the figures; those with bounds are among them."""

BATCHES = ("1", "8", "64", "256")
STEP_SPEEDUP, STEP_MEMORY = 1.15, 0.45
"""Of a training step of attention only: times the speed of compiled full fine-tuning, and most of its peak memory."""

Cells = dict[tuple[str, str, str, str], Row]


def lines(out: Path, outcomes: Sequence[Outcome] = (), smoke: bool = False) -> list[str]:
    """Return the page.

    Args:
        out: folder of the results.
        outcomes: of the steps of this call.
        smoke: of a smoke test, whose figures say nothing.
    """
    kind, git = ("smoke" if smoke else "gpu"), _rows.code_version()

    def of(name: str) -> list[Row]:
        with contextlib.suppress(OSError, UnicodeDecodeError, csv.Error):  # what cannot be read was not measured
            found = _rows.read(out / f"{kind}_{name}.csv")
            return [row for row in found if row.get("git") == git and None not in (*row, *row.values())]
        return []

    e2e = {(r["model"], r["px"], r["batch"], r["provider"]): r for r in of("e2e")}
    found = [
        *_head([*e2e.values()] or of("kernels"), git, smoke),
        *(f"{o.step.name:<10} {o.says:<17} {o.seconds:>4.0f} s" for o in outcomes),
        _checked(of("correct")), _chosen(of("kernels"), out / "choices.json"), "",
        f"{'ms':<23}{'measured':>12} {'predicted':>15} {'floor':>7}  bound",
        *_latencies(e2e), "", "times as fast as torch.compile, max-autotune (b1 >= 1.2, else 1), and timm+graph",
        *_speedups(e2e), "", *_training(of("train")), *_bank(of("bank")),
    ]  # fmt: skip
    failed = [*_failed(of)]
    room = LINES - len(found) - 1
    if failed:
        found += [f"FAILED {len(failed)}:", *(f"  {text}" for text in failed[:room])]
    if smoke:  # toy sizes meet and miss nothing
        found = [re.sub(r" (met|MISSED)\b", "", line) for line in found]
    return [line[:COLUMNS].rstrip() for line in found[:LINES]]


def _head(rows: Sequence[Row], git: str, smoke: bool) -> Iterator[str]:
    if not rows:
        yield f"commit {git}: {NOT}"
        return
    row = rows[-1]
    yield f"{row['device']}, torch {row['torch']}, Triton {row['triton']}, commit {git}, {row['date']}"
    if smoke:
        yield "smoke test: these figures say nothing"


def _checked(rows: Sequence[Row]) -> str:
    last = {(r["unit"], r["case"], r["dtype"]): r for r in rows}
    tests = [r for r in last.values() if r["unit"].startswith("pytest ")]
    compared = [r for r in last.values() if not r["unit"].startswith("pytest ")]

    def held(some: Sequence[Row]) -> str:
        return f"{sum(r['passed'] == 'True' for r in some)} of {len(some)}" if some else NOT

    return f"GPU tests passed, by file: {held(tests)}; comparisons that held: {held(compared)}"


def _chosen(rows: Sequence[Row], path: Path) -> str:
    if not rows or not path.exists():
        return f"choices: {NOT}"
    here = {(r["device"], ".".join(r["torch"].split(".")[:2])) for r in rows}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))["measured"]
        counted = Counter(f"{e['op']} {e['choice']}" for e in table if (e["device"], e["torch"]) in here)
    except (OSError, ValueError, KeyError, TypeError):
        return "choices: choices.json cannot be read"
    return "choices: " + ", ".join(f"{what} {count}" for what, count in sorted(counted.items()))


def _latencies(cells: Cells) -> Iterator[str]:
    """Yield a line per model, px and batch: the quicker form."""
    expected = _bounds.predicted(_rows.read(_rows.RESULTS / _bounds.PREDICTIONS))
    for model, px, batch in CELLS:
        key = (model, str(px), str(batch))
        forms = [cells[(*key, form)] for form in (FUSED, FOLDED) if (*key, form) in cells]
        row = min((r for r in forms if r["median_ms"]), key=lambda r: float(r["median_ms"]), default=None)
        form = row["provider"] if row else FUSED
        wanted = expected.get((*key, form))
        predicted = "" if wanted is None else f"{wanted:.3g}"
        bound = _bounds.LATENCIES.get((model, px, batch), "")
        what = f"{model:<6}{px:>4} b{batch:<4}{form.removesuffix('+graph'):<7}"
        shown = bound.replace(" images/s", "/s").replace(" ms", "")
        if row is None:
            text = "wrong output" if forms else NOT
            yield f"{what}{text:>12} {predicted:>8} {'':>6} {'':>7}  {shown}"
            continue
        ms = float(row["median_ms"])
        off = "" if wanted is None else f"{ms / wanted - 1:+.0%}"
        mark = ""
        if bound:
            sign, limit, unit = bound.split()
            value = ms if unit == "ms" else float(row["images_s"])
            mark = "met" if (value <= float(limit) if sign == "<=" else value >= float(limit)) else "MISSED"
        yield f"{what}{ms:>12.4g} {predicted:>8} {off:>6} {row['floor_ms']:>7}  {shown:<10} {mark}"


def _speedups(cells: Cells) -> Iterator[str]:
    """Yield lines of how many times quicker the quicker form is than others, per batch."""
    for other, short in ((COMPILED, "compile"), ("timm+graph", "timm")):
        for model in _bounds.TUNED:
            parts = [_speedup(cells, model, batch, other) for batch in BATCHES]
            yield f"{model:<6}{short:<9}" + "".join(f"{part:<16}" for part in parts)


def _speedup(cells: Cells, model: str, batch: str, other: str) -> str:
    def ms(provider: str) -> float | None:
        row = cells.get((model, "224", batch, provider))
        return float(row["median_ms"]) if row and row["median_ms"] else None

    mine = min((t for t in map(ms, (FUSED, FOLDED)) if t), default=None)
    theirs = ms(other)
    if mine is None or theirs is None:
        return f"b{batch} not yet"
    least = _bounds.SPEEDUPS[batch] if other == COMPILED else 1.0
    verdict = Verdict("", "", theirs / mine, "", theirs / mine >= least)
    return f"b{batch} {verdict.value:.2f} {'met' if verdict.met else 'MISSED'}"


def _training(rows: Sequence[Row]) -> Iterator[str]:
    """Yield lines of a training step of attention only, against compiled full fine-tuning."""
    last = {r["config"]: r for r in rows if r["step_ms"]}

    def quickest_of(part: str, *, without: str = "no such") -> Row | None:
        mine = (r for name, r in last.items() if re.search(part, name) and without not in name)
        return min(mine, key=lambda r: float(r["step_ms"]), default=None)

    full = quickest_of("^full.*compile")
    quickest, least = quickest_of("^attn", without="by torch"), quickest_of("^attn, minimal")

    def line(what: str, row: Row | None, column: str, bound: str, ratio: float | None, met: bool) -> str:
        if row is None or full is None or ratio is None:
            shown = NOT if row is None or not row[column] else f"{row[column]}, compiled full fine-tuning {NOT}"
            return f"step, {what}: {shown}; bound {bound}"
        mark = "met" if met else "MISSED"
        return f"step, {what}: {row[column]}, full {full[column]}: {ratio:.2f}, predicted 1.25 at most, {bound} {mark}"

    speed = float(full["step_ms"]) / float(quickest["step_ms"]) if full and quickest else None
    yield line("ms", quickest, "step_ms", f">= {STEP_SPEEDUP}", speed, bool(speed and speed >= STEP_SPEEDUP))
    memory = (
        float(least["peak_mb"]) / float(full["peak_mb"])
        if full and least and full["peak_mb"] and least["peak_mb"] else None
    )  # fmt: skip
    text = line("MB", least, "peak_mb", f"<= {STEP_MEMORY} of it", memory, bool(memory and memory <= STEP_MEMORY))
    yield text.replace(", predicted 1.25 at most", "")


def _bank(rows: Sequence[Row]) -> Iterator[str]:
    last = {(r["tasks"], r["images"], r["provider"]): r for r in rows}
    cases = list(dict.fromkeys((tasks, images) for tasks, images, _ in last))
    if not cases:
        yield f"bank: {NOT}"
    for case in cases:
        mine, alone = last.get((*case, "bank fused+graph")), last.get((*case, "fused+graph"))
        if mine and alone:
            ratio = float(alone["ms"]) / float(mine["ms"])
            yield f"bank, {case[0]} tasks × {case[1]}: {mine['ms']} ms, {ratio:.2f} × as fast as a model for each"


def _failed(of: object) -> Iterator[str]:
    for name in ("correct", "kernels", "e2e", "train"):
        last = {tuple(v for k, v in r.items() if k in KEYS[name]): r for r in of(name)}  # type: ignore[operator]
        for key, row in last.items():
            if row.get("passed") == "False":
                yield f"{name}: {' '.join(key)} {row.get('note', '')}"


KEYS = {
    "correct": ("unit", "case", "dtype"), "kernels": ("op", "mode", "provider", "shape", "dtype"),
    "e2e": ("model", "px", "batch", "provider"), "train": ("model", "px", "batch", "config"),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    print("\n".join(lines(args.out, smoke=args.smoke)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
