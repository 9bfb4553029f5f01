"""Stage ``breakdown``: where the time of a fused model goes, kernel by kernel, inside its CUDA graph.

The profiler's times of the kernels of a replay are summed by name; "gaps" is what a replay took beyond them, by the
host's clock and without the profiler. It is 0 where kernels overlap, or the profiler slowed them down, by more. So
shares and not sums are what to read here; `e2e` has the latencies. Rows of a model's folded form name it so.

    benchmarks/gpu.sh breakdown --out DIR
"""

import gc
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import _bounds
import _rows
import _stage
import torch
from _attempts import Attempts
from _groups import COLUMNS, GAPS, by_group
from _store import Deadline, Store, finish
from _subject import FOLDED_GRAPH, FUSED_GRAPH, Subject
from torch import Tensor

KEY = ("model", "px", "batch", "kernel")
CELLS = (("S18x2", 1), ("S18x2", 64), ("B/16", 1), ("B/16", 64), ("B18x2", 1), ("B18x2", 64), ("S36x1", 64))
FORMS = (
    *((*cell, FUSED_GRAPH) for cell in CELLS),
    *((*cell, FOLDED_GRAPH) for cell in CELLS if cell[0] in _bounds.FOLDED_MODELS),
)
WARM, REPLAYS = 3, 10
NAME = 120
"""Characters kept of a kernel's name; template arguments go on for thousands."""

Times = dict[str, tuple[int, float]]
"""Kernel to calls and microseconds of one forward pass."""


def collect(events: Iterable[object], passes: int, wall_us: float) -> Times:
    """Sum the profiler's events by kernel.

    Args:
        events: of `torch.profiler`; those of the host are left out.
        passes: forward passes that they are of.
        wall_us: time of one pass without the profiler.

    Returns:
        The kernels, the longest first, and last the gaps.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:  # type: ignore[attr-defined]
            found[event.name[:NAME]].append(event.device_time)  # type: ignore[attr-defined]
    times = {name: (round(len(us) / passes), sum(us) / passes) for name, us in found.items()}
    ordered = dict(sorted(times.items(), key=lambda item: -item[1][1]))
    return ordered | {GAPS: (0, max(wall_us - sum(us for _, us in times.values()), 0.0))}


def kernel_times(run: Callable[[Tensor], Tensor], images: Tensor) -> Times:
    """Profile forward passes."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(WARM):
        run(images)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(REPLAYS):
        run(images)
    torch.cuda.synchronize()
    wall = 1e6 * (time.perf_counter() - start) / REPLAYS
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            run(images)
        torch.cuda.synchronize()
    return collect(profiler.events(), REPLAYS, wall)


def rows_of(model: str, px: int, batch: int, times: Times) -> list[dict[str, object]]:
    """Return a row per kernel; that of the gaps comes last and says that the cell is complete."""
    total = sum(us for _, us in times.values())
    return [
        {"model": model, "px": px, "batch": batch, "kernel": kernel, "calls": calls, "us": round(us, 2),
         "percent": round(100 * us / total, 1)}
        for kernel, (calls, us) in times.items()
    ]  # fmt: skip


def summary(times: Times) -> str:
    """Return the shares of the groups in one line."""
    groups = by_group((kernel, us) for kernel, (_, us) in times.items())
    total = sum(groups.values())
    return ", ".join(f"{name} {100 * groups[name] / total:.1f} %" for name in COLUMNS)


def main(argv: Sequence[str] | None = None) -> int:
    args = _stage.parser(__doc__, "a tiny model; nothing on a CPU, which has no such clock", 60).parse_args(argv)
    if not torch.cuda.is_available():
        if args.smoke:
            print("breakdown: left out, it reads a CUDA device's own clock")
            return 0
        sys.exit("this stage measures a CUDA device and none is here; --smoke leaves it out")
    deadline = Deadline(args.seconds)
    file = "smoke_breakdown.csv" if args.smoke else "gpu_breakdown.csv"
    store = Store(args.out / file, KEY, lambda: _rows.kernel_context("cuda"))
    attempts = Attempts(args.out, "breakdown", store.git)
    px, failed = 32 if args.smoke else 224, [*attempts.given_up.values()]
    for name, batch, provider in FORMS:
        if args.smoke and (name, batch) != CELLS[0]:
            continue
        model = _bounds.folded(name) if provider == FOLDED_GRAPH else name
        cell = f"{model} {batch}"
        if store.has(model=model, px=px, batch=batch, kernel=GAPS) or cell in attempts.given_up:
            continue
        if not deadline.allows(5, cell):
            continue
        gc.collect()  # the model before
        try:
            with attempts.row(cell, 60), torch.no_grad():
                subject = Subject(name, px, torch.device("cuda"), args.smoke)
                images = subject.images(batch)
                times = kernel_times(subject.provider(provider, images), images)
        except Exception as error:  # the other models are still worth their time
            failed.append(f"{cell}: {type(error).__name__}: {error}")
            continue
        for row in rows_of(model, px, batch, times):
            store.add(row)
            print(f"{cell:<17} {row['calls']:>4} × {row['us']:>9} µs {row['percent']:>5} %  {row['kernel'][:70]}")
        print(f"{cell:<17} {summary(times)}", flush=True)
    return finish("breakdown", deadline, failed)


if __name__ == "__main__":
    sys.exit(main())
