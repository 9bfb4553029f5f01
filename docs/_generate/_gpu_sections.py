"""Sections of the performance page that are measured on a GPU: correctness, kernels, whole models, predictions."""

from collections.abc import Iterable, Iterator, Sequence

import _bounds
import _groups
from _tables import NOT_YET, Row, latest, table, where


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
    yield (
        "Compared with fp64 (kernels) and with timm in fp32 (models). The allowed error is twice that of plain torch "
        "in the same type."
    )
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
        "Median microseconds of one call (percent of the floor). *launch*: each call is started from Python, so that "
        "for small shapes the time is the host's and not the kernel's. All others run inside a CUDA graph of many "
        f"calls that use different operands in turn, so that weights are read from memory. {graphs} rows are inside a "
        f"graph, {launched} are launches of the host."
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
        "Median milliseconds from the call until the device has finished (99th percentile where there were enough "
        "runs), with images on the device. `compile (blocks)` is torch.compile of one block, shared by all "
        "(regional). In `fused` norms are separate kernels, in `folded` they are inside the products; the back-ends "
        "take the faster form for each shape, and `fused` where neither was measured. `+graph`: inside a CUDA graph, "
        "one launch by the host. Without it the host launches each kernel, which decides the time of small batches."
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
            "other's time divided by that of the one named first: above 1 the first is faster."
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
        "Share of the time of a forward pass inside a CUDA graph (fused+graph, or folded+graph for folded models), in "
        "percent, by groups of kernel names. A pass takes longer under the profiler than in the table above."
    )
    yield table(("model", "px", "batch", *_groups.COLUMNS, "sum, µs", "commit"), lines)
    if not any(model == _bounds.folded(name) for model, *_ in found for name in _bounds.FOLDED_MODELS):
        yield f"Folded models: {NOT_YET}."
    yield where(rows)


def predictions(rows: list[Row]) -> Iterator[str]:
    """What a cost model says before a run."""
    yield (
        "Predicted milliseconds of the fused models inside a CUDA graph, from launches, bytes, FLOPs and waves "
        "(`benchmarks/predict.py`, which also prints its error for models that it was not fitted to). *Before* and "
        "*after* three changes: shorter attention, the library's GELU at large batches, and one chain of dependent "
        f"launches at small ones. None is a measurement. Predicted for commit {', '.join({r['git']: 0 for r in rows})}."
    )
    cells = {(r["model"], r["px"], r["batch"], r["provider"], r["form"]): r["ms"] for r in rows}
    places = [(p, form) for p in (_bounds.FUSED, _bounds.FOLDED) for form in ("before", "after")]
    lines = [
        (*case, *(cells.get((*case, *place), "–") for place in places))
        for case in dict.fromkeys((r["model"], r["px"], r["batch"]) for r in rows) if case[2] in _bounds.SPEEDUPS
    ]  # fmt: skip
    yield table(("model", "px", "batch", *(f"{p}, {form}" for p, form in places)), lines)
