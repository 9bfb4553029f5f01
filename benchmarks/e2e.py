"""Stage ``e2e``: latency of whole models, timm's and fused, ungraphed and in CUDA graphs, beside the roofline floor.

Every provider of a cell (model, px, batch) runs in one process, in an order shuffled with a fixed seed, on the same
images, after its logits were compared with timm's in fp32: their error may be twice that of timm in bf16. A run is
timed by the host's clock from the call until the device is done; inputs are on the device. torch.compile works on one
block at a time (regional: all blocks share one compilation) and is measured as such and inside a CUDA graph.

"fused" and "fused+graph" have norms as kernels of their own, "folded+graph" has them inside the products. The quicker
form of each shape goes into ``choices.json``.

    benchmarks/gpu.sh e2e --out DIR
"""

import gc
import itertools
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import _bounds
import _ceilings
import _choices
import _form_choices
import _rows
import _stage
import torch
from _attempts import Attempts
from _models import SUBJECTS
from _plan import ROW_S
from _runner import relative_error
from _store import Deadline, Store, finish
from _subject import (
    COMPILED,
    COMPILED_GRAPH,
    FOLDED_GRAPH,
    FUSED,
    FUSED_GRAPH,
    GRAPH,
    MAX_GRAPH,
    MAX_RUNS,
    PLAIN,
    Subject,
    latencies,
)  # fmt: skip
from roofline import ASSUMED, BATCHES, measured, work
from torch import Tensor

KEY = ("model", "px", "batch", "provider")
PROVIDERS = (PLAIN, GRAPH, FUSED, FUSED_GRAPH)
BOUNDS = {(*cell, form): bound for form in (FUSED_GRAPH, FOLDED_GRAPH) for cell, bound in _bounds.LATENCIES.items()}
"""For the card `_bounds.CARD`, of either form; `_bounds` adds those between models and between providers."""


@dataclass(frozen=True)
class Cell:
    """One model at one size and batch, and who runs it."""

    model: str
    px: int
    batch: int
    providers: tuple[str, ...] = PROVIDERS
    cost: float = 4.0

    @property
    def limit(self) -> float:
        """Seconds after which a row of it is taken to hang."""
        return 30 + 3 * self.cost

    def keys(self) -> list[dict[str, object]]:
        """Return the key of each of its rows."""
        return [{"model": self.model, "px": self.px, "batch": self.batch, "provider": p} for p in self.providers]


def cells(smoke: bool, cuda: bool) -> list[Cell]:
    """Return the plan, what matters most first: a stage that is cut has measured a prefix of it.

    Batch 1 of every model; what torch makes of the same with all its tuning; the throughput of large batches; what lies
    between; and last what no bound is about.
    """
    if smoke:
        return [Cell("S18x2", 32, b, (*PROVIDERS, FOLDED_GRAPH) if cuda else (PLAIN, FUSED)) for b in (1, 2)]

    def cell(name: str, px: int, batch: int) -> Cell:
        return Cell(name, px, batch, (*PROVIDERS, FOLDED_GRAPH) if name in _bounds.FOLDED_MODELS else PROVIDERS)

    def regional(name: str) -> list[Cell]:
        return [Cell(name, 224, batch, (COMPILED, COMPILED_GRAPH), cost=25) for batch in (1, 8, 64)]

    def tuned(batch: int) -> list[Cell]:
        return [Cell(name, 224, batch, (MAX_GRAPH,), cost=ROW_S["max-autotune"]) for name in _bounds.TUNED]

    large, rest = (64, 256), tuple(b for b in BATCHES if b not in (1, 8, 64, 256))
    more = [subject for subject in SUBJECTS if subject[0] not in _bounds.OVER_GRAPH_MODELS]
    return [
        *(cell(name, px, 1) for name, px in SUBJECTS),
        *tuned(1),
        *(cell(name, px, batch) for name, px in SUBJECTS for batch in (large if (name, px) in more else (64,))),
        *(cell(name, px, 8) for name, px in SUBJECTS),
        *(c for batch in (64, 8, 256) for c in tuned(batch)),
        *regional("S18x2"), *regional("S36x1"), *regional("B/16"),
        *(cell(name, px, batch) for name, px in more for batch in rest),
    ]  # fmt: skip


def duration_of(provider: str, batch: int, seconds: float) -> float:
    """Return how long to time a provider: plain timm at large batches is slow, steady, and needs less."""
    return min(seconds, 0.2) if provider == PLAIN and batch >= 64 else seconds


def measure(subject: Subject, batch: int, provider: str, exact: Tensor, duration: float) -> dict[str, object]:
    """Compare one provider with fp32, time it, and return its numbers; what is wrong is not timed."""
    images = subject.images(batch)
    cuda = subject.device.type == "cuda"
    allowed = relative_error([subject.plain(images)], [exact])
    before = 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    run = subject.provider(provider, images)
    error = relative_error([run(images)], [exact])
    peak = (torch.cuda.max_memory_allocated() - before) / 1e6 if cuda else None
    passed = error <= 2 * allowed + torch.finfo(subject.dtype).eps / 4
    row: dict[str, object] = {"runs": 0, "median_ms": None, "p99_ms": None, "images_s": None}
    if passed:
        ms = latencies(lambda: run(images), subject.device, duration)
        median = statistics.median(ms)
        p99 = sorted(ms)[math.ceil(0.99 * len(ms)) - 1] if len(ms) >= MAX_RUNS else None
        row = {
            "runs": len(ms), "median_ms": round(median, 4), "p99_ms": None if p99 is None else round(p99, 4),
            "images_s": round(1e3 * batch / median, 1),
        }  # fmt: skip
    return row | {
        "peak_mb": None if peak is None else round(peak, 1), "error": f"{error:.2e}", "torch_error": f"{allowed:.2e}",
        "passed": passed,
    }  # fmt: skip


def run_cell(
    subject: Subject, cell: Cell, store: Store, deadline: Deadline, duration: float, attempts: Attempts
) -> list[str]:
    """Measure the providers of a cell that are still owed, in the cell's own random order; return what went wrong."""
    errors = []
    ceilings, cache = measured(store.path.parent)
    floor = work(subject.model, cell.batch).floor_us(ceilings or ASSUMED, cache)
    keys = cell.keys()
    random.Random(f"{cell.model} {cell.px} {cell.batch}").shuffle(keys)
    exact = None
    for key in keys:
        name, provider = " ".join(map(str, key.values())), str(key["provider"])
        if store.has(**key) or name in attempts.given_up or not deadline.allows(cell.cost, name):
            continue
        try:
            with attempts.row(name, cell.limit):
                exact = subject.exact(cell.batch) if exact is None else exact
                row = measure(subject, cell.batch, provider, exact, duration_of(provider, cell.batch, duration))
        except Exception as error:  # out of memory, a compiler's: the other cells are still worth their time
            errors.append(f"{name}: {type(error).__name__}: {error}")
            continue
        finally:
            subject.release()
        bound = BOUNDS.get((cell.model, cell.px, cell.batch, provider), "")
        basis = {"floor_ms": round(floor / 1e3, 4), "ceilings": "measured" if ceilings else "assumed", "bound": bound}
        store.add({**key, "dtype": str(subject.dtype).removeprefix("torch."), **row, **basis})
        text = f"{row['median_ms']} ms, floor {floor / 1e3:.3f}" if row["passed"] else f"WRONG, error {row['error']}"
        print(f"{name:<44} {text} {bound}", flush=True)
    return errors


def main(argv: Sequence[str] | None = None) -> int:
    parser = _stage.parser(__doc__, "a tiny model, also on a CPU")
    parser.add_argument("--batch-1", action="store_true", help="only the first part of the plan, batch 1")
    parser.add_argument("--duration", type=float, default=0.3, help="seconds of timed runs per provider and cell")
    args = parser.parse_args(argv)
    deadline = Deadline(args.seconds)
    device = _stage.device(args.smoke)
    name = "smoke_e2e.csv" if args.smoke else "gpu_e2e.csv"
    store = Store(args.out / name, KEY, lambda: _rows.kernel_context(device.type))
    attempts = Attempts(args.out, "e2e", store.git)
    ceilings_file = args.out / "gpu_ceilings.csv"
    if device.type == "cuda" and measured(ceilings_file)[0] is None:
        with attempts.row("ceilings", 60):
            for row in _ceilings.measure(device).rows():
                _rows.append(ceilings_file, {**row, **_rows.kernel_context("cuda")})
    failed: list[str] = []

    def write_choices() -> None:
        if not args.smoke:
            _form_choices.write(args.out / "choices.json", _form_choices.entries(store.current()))

    subject: tuple[tuple[str, int], Subject] | None = None
    plan = cells(args.smoke, device.type == "cuda")
    first = itertools.takewhile(lambda c: c.batch == 1 and c.providers != (MAX_GRAPH,), plan)
    for cell in first if args.batch_1 else plan:
        model = f"{cell.model} {cell.px}"
        names = {" ".join(map(str, key.values())): key for key in cell.keys()}
        failed += [why for name, why in attempts.given_up.items() if name in (*names, model)]
        owed = [name for name, key in names.items() if name not in attempts.given_up and not store.has(**key)]
        if not owed or model in attempts.given_up:
            continue
        if deadline.left < cell.cost:  # a model is not built for nothing
            deadline.missing += owed
            continue
        try:
            if subject is None or subject[0] != (cell.model, cell.px):
                subject = None
                gc.collect()
                with attempts.row(model, 90):
                    subject = (cell.model, cell.px), Subject(cell.model, cell.px, device, args.smoke)
            with torch.no_grad():
                failed += run_cell(subject[1], cell, store, deadline, 0.01 if args.smoke else args.duration, attempts)
        except Exception as error:  # no memory for the model: others are smaller
            failed += [f"{name}: {type(error).__name__}: {error}" for name in owed]
        if FOLDED_GRAPH in cell.providers:  # which form is the quicker is decided
            _choices.keep(failed, write_choices)
    failed = list(dict.fromkeys(failed))
    for verdict in _bounds.verdicts(store.current()):
        print(f"bound: {verdict}", flush=True)
    failed += [" ".join(row[k] for k in KEY) for row in store.current() if row["passed"] != "True"]
    return finish("e2e", deadline, failed)


if __name__ == "__main__":
    sys.exit(main())
