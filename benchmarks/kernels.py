"""Stage ``kernels``: ceilings and launch costs, then each kernel against plain torch and torch.compile.

An operation is measured only if its comparisons of the stage ``correct`` held, which are made here first if there are
none. What torch.compile does comes last: it takes seconds to compile. ``choices.json`` gets, per shape, the quickest of
our kernel and torch's, and goes to ``kernels/vtk_kernels/choices.json`` once somebody has looked at it.

    benchmarks/gpu.sh kernels --out DIR
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import _ceilings
import _choices
import _rows
import _stage
import correct
import torch
from _runner import KEY, Bench, Case, Ceilings, measure, show
from _store import Deadline, Store, finish


def cells(benches: dict[str, Bench], smoke: bool) -> Iterator[tuple[Bench, Case, str]]:
    """Yield operation, case and provider: torch.compile after everything else."""
    tiny = "bf16" if torch.cuda.is_available() else "fp32"  # in fp32 our operations are torch's, on CUDA too
    for compiled in (False,) if smoke else (False, True):
        for bench in benches.values():
            for case in [replace(bench.checks[0], dtype=tiny)] if smoke else bench.cases:
                for provider in bench.names(case):
                    if (provider == "compile") == compiled:
                        yield bench, case, provider


def is_green(op: str, out: Path, device: torch.device, smoke: bool) -> bool:
    """Return whether the operation's comparisons held; without any by this code they are made now."""
    name = "smoke_correct.csv" if smoke else "gpu_correct.csv"
    store = Store(out / name, correct.KEY, lambda: _rows.kernel_context(device.type))
    unit = f"op {op}"
    if not any(row["unit"] == unit for row in store.current()):
        for row in correct.run_unit(unit, device, smoke):
            store.add(row)
    return all(row["passed"] == "True" for row in store.current() if row["unit"] == unit)


def ceilings_of(out: Path, device: torch.device, smoke: bool) -> Ceilings | None:
    """Measure the device's ceilings, or take them from this device's earlier call."""
    name = "smoke_ceilings.csv" if smoke else "gpu_ceilings.csv"
    store = Store(out / name, _ceilings.KEY, lambda: _rows.kernel_context(device.type))
    if _ceilings.from_rows(store.current()) is None:
        for row in _ceilings.measure(device, quick=smoke).rows():
            store.add(row)
            print(f"{row['what']}: {row['value']} {row['unit']}", flush=True)
    return _ceilings.from_rows(store.current())


def main(argv: Sequence[str] | None = None) -> int:
    parser = _stage.parser(__doc__, "one tiny shape each, also on a CPU")
    args = parser.parse_args(argv)
    deadline = Deadline(args.seconds)
    device = _stage.device(args.smoke)
    store = Store(
        args.out / ("smoke_kernels.csv" if args.smoke else "gpu_kernels.csv"), KEY,
        lambda: _rows.kernel_context(device.type),
    )  # fmt: skip
    ceilings = ceilings_of(args.out, device, args.smoke)
    benches = correct.benches()
    green: dict[str, bool] = {}
    failed = []
    for bench, case, provider in cells(benches, args.smoke):
        key = dict(zip(KEY, (bench.op, case.mode, provider, case.label, case.dtype), strict=True))
        if store.has(**key) or not deadline.allows(15 if provider == "compile" else 2, " ".join(key.values())):
            continue
        if bench.op not in green:
            green[bench.op] = is_green(bench.op, args.out, device, args.smoke)
            if not green[bench.op]:
                failed.append(
                    f"{bench.op}: its comparisons fail, so nothing of it was measured (see the stage correct)"
                )
        if green[bench.op]:
            row = measure(bench, case, provider, device, ceilings, quick=args.smoke)
            store.add(row)
            show(row)
    if not args.smoke:
        _choices.write(args.out / "choices.json", _choices.entries(benches, store.current()))
    failed += [" ".join(row[k] for k in KEY) for row in store.current() if row["passed"] != "True"]
    return finish("kernels", deadline, failed)


if __name__ == "__main__":
    sys.exit(main())
