"""Writes docs/performance.md from benchmarks/results/*.csv; ``--check`` says whether it is up to date.

Usage: python docs/performance.py [--check]

Every number on the page comes from a result file; what nobody measured is called "not yet measured".
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from _pages import write_or_check
from _tables import Row, latest, load, table, where

PAGE = Path(__file__).with_name("performance.md")
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
NOT_YET = "not yet measured"

HEAD = """# Performance

Written by `make docs` from `benchmarks/results/*.csv`; do not edit by hand. Each table says where, when and by which
commit its rows were measured. The outputs of models and kernels were compared before they were timed.

S18x2 is paper A's small model of 18 blocks with two parallel branches, S36x1 its sequential twin of 36 blocks; B18x2
and B36x1 are the base models, S/16 and B/16 the usual ones. Weights are random: values do not change a latency.
"""

REPRODUCE = """## Measure again

On a CPU, with nothing else running:

```
python benchmarks/fused_cpu.py
python benchmarks/launches.py
```

On a CUDA machine with torch, Triton and timm; a stage that ran out of time goes on where it stopped:

```
pip install --no-deps --no-build-isolation -e .
benchmarks/gpu.sh correct kernels e2e --out DIR
cp DIR/gpu_*.csv benchmarks/results/
```

Then `make docs`. `DIR/choices.json` holds the measured choices between our kernels and torch's, in the form of
`kernels/vtk_kernels/choices.json`.
"""

FLOOR = """## The floor

What a device that does nothing else needs, `benchmarks/roofline.py`: the larger of FLOPs over the rate of a large bf16
GEMM, and bytes over the rate of a large copy, both measured on the same device (else assumed, and a table says so). For
L blocks of P branches with C channels, hidden width rC, N tokens and A classes:

```
FLOPs   L P ((8 + 4 r) N C² + 4 N² C) + stem 2 patches patch² 3 C + head 2 A C, each per image
bytes   every weight once; and, once a block's x and hidden layer no longer fit into the L2 cache,
        L (6 + (8 + 2 r) P) N C elements per image: each tensor between two kernels written and read once
```
"""


def section(title: str, name: str, results: Path, body: Callable[[list[Row]], Iterator[str]]) -> Iterator[str]:
    """Yield a section per device of a result file, or that it was not measured."""
    yield f"## {title}"
    rows = load(name, results)
    if not rows:
        yield f"{NOT_YET.capitalize()}."
    for device in dict.fromkeys(row["device"] for row in rows):
        yield from body([row for row in rows if row["device"] == device])


def launches(rows: list[Row]) -> Iterator[str]:
    """Kernels per forward pass."""
    found = latest(rows, "model")
    yield "Counted on the CUDA plan, not timed."
    yield table(("model", "kernels", "bound"), [(r["model"], r["kernels"], r["bound"] or "–") for r in found])
    yield where(found)


def cpu(rows: list[Row]) -> Iterator[str]:
    """Fused against timm, and ONNX."""
    found = latest(rows, "comparison", "case")
    head = ("comparison", "case", "sequential", "parallel", "fused", "unit", "ratio", "bound", "rounds")
    yield "Sides run in turns; medians over rounds. The ratio is the one named, against the better of timm's two."
    yield table(head, [[r[k] or "–" for k in head] for r in found], left=2)
    yield where(found)


def engine(rows: list[Row]) -> Iterator[str]:
    """Training engine."""
    found = latest(rows, "comparison", "case")
    head = ("comparison", "case", "first", "second", "unit", "ratio", "bound", "rounds")
    yield table(head, [[r[k] or "–" for k in head] for r in found], left=2)
    yield where(found)


def correct(rows: list[Row]) -> Iterator[str]:
    """How many comparisons held, per kernel and model."""
    found = latest(rows, "unit", "case", "dtype")
    lines = []
    for unit in dict.fromkeys(row["unit"] for row in found):
        mine = [row for row in found if row["unit"] == unit]
        compared = [row for row in mine if row["error"]]
        worst = max(compared, key=lambda r: float(r["error"]), default={"error": "–", "torch_error": "–"})
        held = sum(row["passed"] == "True" for row in mine)
        lines.append((unit, f"{held} of {len(mine)}", worst["error"], worst["torch_error"]))
    yield "Against fp64 (kernels) and timm in fp32 (models). An error may be twice plain torch's in the same type."
    yield table(("what", "held", "largest error", "torch's there"), lines)
    yield where(found)


def ceilings(rows: list[Row]) -> Iterator[str]:
    """What the device reached."""
    found = latest(rows, "what")
    yield table(("what", "value", "unit"), [(r["what"], r["value"], r["unit"]) for r in found])
    yield where(found)


def kernels(rows: list[Row]) -> Iterator[str]:
    """Each kernel's time per provider."""
    found = latest(rows, "op", "mode", "provider", "shape", "dtype")
    for op in sorted({row["op"] for row in found}):
        mine = [row for row in found if row["op"] == op]
        providers = list(dict.fromkeys(row["provider"] for row in mine))
        lines = []
        for case in dict.fromkeys((r["shape"], r["mode"], r["dtype"]) for r in mine):
            cells = {r["provider"]: r for r in mine if (r["shape"], r["mode"], r["dtype"]) == case}
            lines.append([*case, *(_kernel_cell(cells.get(p)) for p in providers)])
        yield f"### {op}"
        yield table(("shape", "mode", "type", *providers), lines, left=3)
    yield "Microseconds, median with an emptied L2 cache (percent of the floor)."
    yield where(found)


def _kernel_cell(row: Row | None) -> str:
    if row is None or not row["p50_us"]:
        return "–" if row is None else "wrong output"
    return row["p50_us"] + (f" ({row['percent']} %)" if row["percent"] else "")


def end_to_end(rows: list[Row]) -> Iterator[str]:
    """Latency of whole models."""
    found = latest(rows, "model", "px", "batch", "provider")
    cells = {(r["model"], r["px"], r["batch"], r["provider"]): r for r in found}
    yield (
        "Milliseconds from the call until the device is done, median (99th percentile where there were enough runs); "
        "images on the device. `compile (blocks)` is torch.compile of one block, shared by all (regional)."
    )
    for model, px in dict.fromkeys((r["model"], r["px"]) for r in found):
        mine = [r for r in found if (r["model"], r["px"]) == (model, px)]
        providers = sorted({r["provider"] for r in mine}, key=lambda p: (p.startswith("compile"), "fused" in p, p))
        batches = sorted({r["batch"] for r in mine}, key=int)
        lines = []
        for batch in batches:
            here = [cells.get((model, px, batch, p)) for p in providers]
            best = max((float(r["images_s"]) for r in here if r and r["images_s"]), default=None)
            any_row = next(r for r in here if r)
            floor = f"{any_row['floor_ms']} ({any_row['ceilings']})"
            lines.append([batch, *map(_latency, here), floor, "–" if best is None else f"{best:.0f}"])
        yield f"### {model}, {px} px"
        yield table(("batch", *providers, "floor", "best, images/s"), lines, left=0)
    yield from _bounds(found)
    yield from _twins(cells)
    yield where(found)


def _latency(row: Row | None) -> str:
    if row is None or not row["median_ms"]:
        return "–" if row is None else "wrong output"
    return row["median_ms"] + (f" ({row['p99_ms']})" if row["p99_ms"] else "")


def _bounds(rows: list[Row]) -> Iterator[str]:
    lines = []
    for row in rows:
        if row["bound"] and row["median_ms"]:
            sign, limit, unit = row["bound"].split()
            value = float(row["median_ms"] if unit == "ms" else row["images_s"])
            held = value <= float(limit) if sign == "<=" else value >= float(limit)
            what = f"{row['model']}, {row['px']} px, batch {row['batch']}, {row['provider']}"
            lines.append((what, row["bound"], f"{value:g}", f"{row['floor_ms']} ms", "yes" if held else "**no**"))
    if lines:
        yield "### Bounds"
        yield table(("what", "bound", "measured", "floor", "held"), lines)


def _twins(cells: dict[tuple[str, ...], Row]) -> Iterator[str]:
    lines = []
    for parallel, twin in (("S18x2", "S36x1"), ("B18x2", "B36x1")):
        for model, px, batch, provider in cells:
            other = cells.get((twin, px, batch, provider))
            mine = cells[model, px, batch, provider]
            if model == parallel and other and other["median_ms"] and mine["median_ms"]:
                ratio = float(other["median_ms"]) / float(mine["median_ms"])
                lines.append((parallel, provider, int(batch), f"{ratio:.2f}"))
    if lines:
        yield "### Parallel against sequential"
        yield "Time of the sequential twin over that of the parallel model: above 1 the parallel one is quicker."
        lines.sort()
        yield table(("model", "provider", "batch", "ratio"), [(*a, str(b), c) for *a, b, c in lines], left=2)


SECTIONS = (
    ("Kernels per forward pass", "launches.csv", launches),
    ("CPU", "fused_cpu.csv", cpu),
    ("GPU: is it right?", "gpu_correct.csv", correct),
    ("GPU: ceilings", "gpu_ceilings.csv", ceilings),
    ("GPU: kernels", "gpu_kernels.csv", kernels),
    ("GPU: whole models", "gpu_e2e.csv", end_to_end),
    ("Training engine", "engine.csv", engine),
)


def page(results: Path = RESULTS) -> str:
    """Return the whole page."""
    parts = [HEAD.strip(), FLOOR.strip()]
    for title, name, body in SECTIONS:
        parts.extend(section(title, name, results, body))
    return "\n\n".join([*parts, REPRODUCE.strip()]) + "\n"


def main() -> int:
    """Write the page, or compare it."""
    return write_or_check(PAGE, page(), "benchmarks/results")


if __name__ == "__main__":
    sys.exit(main())
