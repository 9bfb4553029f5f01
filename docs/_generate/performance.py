"""Writes docs/results/performance.md from benchmarks/results/*.csv; ``--check`` says whether it is up to date.

Usage: python docs/_generate/performance.py [--check]

Every number on the page comes from a result file; what nobody measured is called "not yet measured".
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from _pages import write_or_check
from _tables import Row, latest, load, table, where

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import _bounds
import _groups
import _sources

PAGE = Path(__file__).resolve().parents[1] / "results" / "performance.md"
RESULTS = Path(_bounds.__file__).with_name("results")
NOT_YET = "not yet measured"

HEAD = """# Performance

Written by `make docs` from `benchmarks/results/*.csv`; do not edit by hand. Each table says where, when and by which
commit its rows were measured; every row names its card, and cards are shown apart. The outputs of models and kernels
were compared before they were timed.

A row of our own code on a GPU is marked *stale* where the files that it timed have changed since: those of the kernel
and of all that it imports, for whole models of every kernel and of `vtk/fused`. What is called *of unknown code* names
a commit that is in no history. Rows of timm, torch and the device itself do not age so.

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
benchmarks/gpu.sh all --out DIR
python benchmarks/collect.py DIR
```

`DIR/summary.txt` sets each figure beside its prediction, its floor and its bound. Then `make docs`. `DIR/choices.json`
holds the measured choices between our kernels and torch's, in the form of
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
    rows, known = load(name, results), _sources.recorded(results)
    if not rows:
        yield f"{NOT_YET.capitalize()}."
    rows = [row | {"state": _sources.state_of(name, row, known)} for row in rows]
    for device in dict.fromkeys(row.get("device", "") for row in rows):
        if title.startswith("GPU") and device:
            yield f"**{device}**"
        yield from body([row for row in rows if row.get("device", "") == device])


def commits(rows: Iterable[Row]) -> str:
    """Return the commits of rows, each with what its rows of our own code are."""
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row["git"], set()).add(row["state"])
    return ", ".join(" ".join((git, *(f"*{s}*" for s in sorted(states) if s))) for git, states in found.items())


def ages(rows: Sequence[Row]) -> Iterator[str]:
    """Say how many rows are older than what they time."""
    for state in ("stale", "of unknown code"):
        if count := sum(row["state"] == state for row in rows):
            yield f"{count} of these {len(rows)} rows are *{state}*."


def launches(rows: list[Row]) -> Iterator[str]:
    """Kernels per forward pass."""
    found = latest(rows, "model")
    lines = [(r["model"], r["kernels"], r["bound"] or "–") for r in found]
    bounds = {_bounds.folded(model): bound for model, bound in _bounds.FOLDED_LAUNCHES.items()}
    lines += [(name, NOT_YET, bound) for name, bound in bounds.items() if all(r["model"] != name for r in found)]
    yield (
        "Counted on the CUDA plan, not timed. Norms are kernels of their own, or *folded*: the products that write the "
        "residual stream leave its statistics, and those that read it apply them."
    )
    yield table(("model", "kernels", "bound"), lines)
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


def joint(rows: list[Row]) -> Iterator[str]:
    """Several tasks in one run against runs of their own."""
    found = latest(rows, "model", "task", "tasks", "epochs", "batch_size")
    sizes = ("peak_alone_bytes", "peak_together_bytes", "allowed_bytes")
    lines = [
        (r["model"], r["task"], r["top1_alone"], r["top1_together"], *(f"{int(r[k]) / 1e6:.0f}" for k in sizes))
        for r in found
    ]
    yield (
        "Held-out top-1, and the peak memory of the process in MB. Allowed is the first task's peak, and of each other "
        "its trained weights, gradients, optimiser state and activations."
    )
    yield table(("model", "task", "alone", "together", "peak alone", "together", "allowed"), lines, left=2)
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
        lines.append((unit, f"{held} of {len(mine)}", worst["error"], worst["torch_error"], commits(mine)))
    yield "Against fp64 (kernels) and timm in fp32 (models). An error may be twice plain torch's in the same type."
    yield from ages(found)
    yield table(("what", "held", "largest error", "torch's there", "commit"), lines)
    yield where(found)


def ceilings(rows: list[Row]) -> Iterator[str]:
    """What the device reached."""
    found = latest(rows, "what")
    yield table(("what", "value", "unit"), [(r["what"], r["value"], r["unit"]) for r in found])
    yield where(found)


def kernels(rows: list[Row]) -> Iterator[str]:
    """Each kernel's time per provider."""
    found = latest(rows, "op", "mode", "provider", "shape", "dtype")
    graphs = sum(row.get("timer") == "graph" for row in found)
    launched = sum(row.get("timer") == "launch" for row in found)
    yield (
        "Microseconds of one call, median (percent of the floor). *launch*: started one by one from Python, so that "
        "a small shape shows the host's time and not the kernel's. All others: inside a CUDA graph of many calls, "
        "whose operands rotate, so that weights come from memory. "
        f"{graphs} rows are inside a graph, {launched} are launches of the host."
    )
    yield from ages(found)
    for op in sorted({row["op"] for row in found}):
        mine = [row for row in found if row["op"] == op]
        providers = list(dict.fromkeys(row["provider"] for row in mine))
        lines = []
        for case in dict.fromkeys((r["shape"], r["mode"], r["dtype"]) for r in mine):
            cells = {r["provider"]: r for r in mine if (r["shape"], r["mode"], r["dtype"]) == case}
            lines.append([*case, *(_kernel_cell(cells.get(p)) for p in providers), commits(cells.values())])
        yield f"### {op}"
        yield table(("shape", "mode", "type", *providers, "commit"), lines, left=3)
    yield where(found)


def _kernel_cell(row: Row | None) -> str:
    if row is None or not row["p50_us"]:
        return "–" if row is None else "wrong output"
    launched = "" if row.get("timer") == "graph" else " *launch*"
    return row["p50_us"] + (f" ({row['percent']} %)" if row["percent"] else "") + launched


def end_to_end(rows: list[Row]) -> Iterator[str]:
    """Latency of whole models."""
    found = latest(rows, "model", "px", "batch", "provider")
    cells = {(r["model"], r["px"], r["batch"], r["provider"]): r for r in found}
    yield (
        "Milliseconds from the call until the device is done, median (99th percentile where there were enough runs); "
        "images on the device. `compile (blocks)` is torch.compile of one block, shared by all (regional). `fused` has "
        "norms as kernels of their own, `folded` has them inside the products; the back-ends take the quicker form of "
        "each shape, and where none was measured the former. What ends in `+graph` runs inside a CUDA graph that the "
        "host launches once; all else is launched by the host kernel by kernel, and at small batches shows the host."
    )
    yield from ages(found)
    for model, px in dict.fromkeys((r["model"], r["px"]) for r in found):
        mine = [r for r in found if (r["model"], r["px"]) == (model, px)]
        owed = {_bounds.FOLDED} if model in _bounds.FOLDED_MODELS else set()
        providers = sorted({r["provider"] for r in mine} | owed, key=_place)
        batches = sorted({r["batch"] for r in mine}, key=int)
        lines = []
        for batch in batches:
            here = [cells.get((model, px, batch, p)) for p in providers]
            best = max((float(r["images_s"]) for r in here if r and r["images_s"]), default=None)
            any_row = next(r for r in here if r)
            floor = f"{any_row['floor_ms']} ({any_row['ceilings']})"
            most = f"{1e3 * int(batch) / float(any_row['floor_ms']):.0f}"
            shown = (NOT_YET if r is None and p in owed else _latency(r) for p, r in zip(providers, here, strict=True))
            lines.append(
                [batch, *shown, floor, "–" if best is None else f"{best:.0f}", most, commits(filter(None, here))]
            )
        yield f"### {model}, {px} px"
        yield table(("batch", *providers, "floor", "best, images/s", "floor, images/s", "commit"), lines, left=0)
    yield from _judged(found)
    yield where(found)


def _place(provider: str) -> tuple[bool, bool, bool, str]:
    """Return where a provider's column is: timm's, the fused model's, the folded one, those of torch.compile."""
    return provider.startswith("compile"), provider == _bounds.FOLDED, "fused" in provider, provider


def _latency(row: Row | None) -> str:
    if row is None or not row["median_ms"]:
        return "–" if row is None else "wrong output"
    return row["median_ms"] + (f" ({row['p99_ms']})" if row["p99_ms"] else "")


def _judged(rows: list[Row]) -> Iterator[str]:
    lines = [
        (v.what, v.bound, f"{v.value:.2f}" if v.bound.endswith("×") else f"{v.value:g}", f"{v.floor_ms} ms",
         v.says if v.met else f"**{v.says}**")
        for v in _bounds.verdicts(rows)
    ]  # fmt: skip
    if lines:
        yield "### Bounds"
        yield (
            f"Latencies and rates were set for an {_bounds.CARD}; these are of {rows[0]['device']}. Ratios are the "
            "other's time over that of the one named first: above 1 it is quicker."
        )
        yield table(("what", "bound", "measured", "floor", "outcome"), lines)


def breakdown(rows: list[Row]) -> Iterator[str]:
    """Share of time per group of kernels."""
    found = _groups.cells(rows)
    last = {(row["model"], row["px"], row["batch"]): row for row in rows}
    lines = []
    for (model, px, batch), groups in found.items():
        total = sum(groups.values())
        shares = (f"{100 * groups[name] / total:.1f}" for name in _groups.COLUMNS)
        lines.append((model, px, batch, *shares, f"{total:.0f}", commits([last[model, px, batch]])))
    yield (
        "Percent of the time of a forward pass inside a CUDA graph (fused+graph; of a model called folded, "
        "folded+graph), kernels grouped by name. Under the profiler a pass takes longer than above."
    )
    yield table(("model", "px", "batch", *_groups.COLUMNS, "sum, µs", "commit"), lines)
    if not any(model == _bounds.folded(name) for model, *_ in found for name in _bounds.FOLDED_MODELS):
        yield f"Folded models: {NOT_YET}."
    yield where(rows)


def predictions(rows: list[Row]) -> Iterator[str]:
    """What a cost model says before a run."""
    yield (
        "Milliseconds of the fused models inside a CUDA graph, from their launches, bytes, FLOPs and waves: "
        "`benchmarks/predict.py`, which also says how far off it is for models that its constants were not fitted to. "
        "*Before* and *after* shorter attention, the library's GELU at large batches, and one chain of dependent "
        f"launches at small ones. None is a measurement. Predicted for commit {', '.join({r['git']: 0 for r in rows})}."
    )
    cells = {(r["model"], r["px"], r["batch"], r["provider"], r["form"]): r["ms"] for r in rows}
    places = [(p, form) for p in (_bounds.FUSED, _bounds.FOLDED) for form in ("before", "after")]
    lines = [
        (*case, *(cells.get((*case, *place), "–") for place in places))
        for case in dict.fromkeys((r["model"], r["px"], r["batch"]) for r in rows) if case[2] in _bounds.SPEEDUPS
    ]  # fmt: skip
    yield table(("model", "px", "batch", *(f"{p}, {form}" for p, form in places)), lines)


SECTIONS = (
    ("Kernels per forward pass", "launches.csv", launches),
    ("CPU", "fused_cpu.csv", cpu),
    ("GPU: is it right?", "gpu_correct.csv", correct),
    ("GPU: ceilings", "gpu_ceilings.csv", ceilings),
    ("GPU: kernels", "gpu_kernels.csv", kernels),
    ("GPU: whole models", "gpu_e2e.csv", end_to_end),
    ("GPU: where the time goes", "gpu_breakdown.csv", breakdown),
    ("GPU: predictions", _bounds.PREDICTIONS, predictions),
    ("Training engine", "engine.csv", engine),
    ("Several tasks in one run", "joint.csv", joint),
)


def page(results: Path = RESULTS) -> str:
    """Return the whole page."""
    parts = [HEAD.strip(), FLOOR.strip()]
    for title, name, body in SECTIONS:
        parts.extend(section(title, name, results, body))
    return "\n\n".join([*parts, REPRODUCE.strip()]) + "\n"


def main() -> int:
    """Write the page, or compare it; where it is written, the code that rows name is first put on record."""
    if "--check" not in sys.argv[1:]:
        _sources.record(RESULTS)
    return write_or_check(PAGE, page(), "benchmarks/results")


if __name__ == "__main__":
    sys.exit(main())
