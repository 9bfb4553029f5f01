"""Stage ``kernels``: ceilings and launch costs, then each kernel against plain torch and torch.compile.

An operation is measured only if its comparisons of the stage ``correct`` held, which are made here first if there are
none. What torch.compile does comes last: it takes seconds to compile. ``choices.json`` gets, per shape, the quickest of
our kernel and torch's, as soon as both were measured, and goes to ``kernels/vtk_kernels/choices.json`` once somebody
has looked at it.

With ``--deciding`` only rows that decide a choice are measured, the smallest shapes first, each after its own outputs
were compared; comparisons that are known to fail still leave an operation out.

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
from _attempts import Attempts
from _plan import ROW_S
from _runner import KEY, Bench, Case, Ceilings, measure, show
from _store import Deadline, Store, finish

LIMIT = 40.0
"""Seconds, beside three times what is expected, after which a row is taken to hang; the first of an operation may make
its comparisons."""

LIBRARY = ("aten", "sdpa", "grouped_mm", "cublaslt", "flash", "cudnn")
"""Choices that compile nothing."""


def cells(benches: dict[str, Bench], smoke: bool) -> Iterator[tuple[Bench, Case, str]]:
    """Yield operation, case and provider: torch.compile after everything else.

    Of an operation with choices only plain torch and what may be chosen: other ways to call it decide nothing.
    """
    tiny = "bf16" if torch.cuda.is_available() else "fp32"  # in fp32 our operations are torch's, on CUDA too
    for compiled in (False,) if smoke else (False, True):
        for bench in benches.values():
            for case in [replace(bench.checks[0], dtype=tiny)] if smoke else bench.cases:
                for provider in bench.names(case):
                    if (provider == "compile") == compiled and (compiled or _counts(bench, provider)):
                        yield bench, case, provider


def _counts(bench: Bench, provider: str) -> bool:
    return not bench.answers or provider in bench.answers or provider == next(iter(bench.providers))


def deciding(benches: dict[str, Bench]) -> list[tuple[Bench, Case, str]]:
    """Return the rows of all benches that decide choices, those of a shape together, small shapes first."""
    shapes = [
        (bench, case) for bench in benches.values() for case in bench.cases
        if len(bench.deciding(case)) > 1 and case.mode == "forward" and bench.choice(case) is not None
    ]  # fmt: skip
    shapes.sort(key=lambda shape: (shape[1].flops, shape[1].bytes))
    return [(bench, case, provider) for bench, case in shapes for provider in bench.deciding(case)]


def cost_of(bench: Bench, provider: str) -> float:
    """Return the seconds that a row is expected to take."""
    library = provider == next(iter(bench.providers)) or bench.answers.get(provider) in LIBRARY
    return ROW_S["compile" if provider == "compile" else "library" if library else "ours"]


def is_green(op: str, out: Path, device: torch.device, smoke: bool, compare: bool = True) -> bool:
    """Return whether the operation's comparisons held; without any by this code they are made now, if ``compare``."""
    name = "smoke_correct.csv" if smoke else "gpu_correct.csv"
    store = Store(out / name, correct.KEY, lambda: _rows.kernel_context(device.type))
    unit = f"op {op}"
    if compare and not any(row["unit"] == unit for row in store.current()):
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
    parser.add_argument("--deciding", action="store_true", help="only rows that decide a choice")
    args = parser.parse_args(argv)
    deadline = Deadline(args.seconds)
    device = _stage.device(args.smoke)
    store = Store(
        args.out / ("smoke_kernels.csv" if args.smoke else "gpu_kernels.csv"), KEY,
        lambda: _rows.kernel_context(device.type),
    )  # fmt: skip
    attempts = Attempts(args.out, "kernels", store.git)
    benches = correct.benches()
    failed = list(attempts.given_up.values())
    ceilings = None
    try:
        with attempts.row("ceilings", 60):
            ceilings = ceilings_of(args.out, device, args.smoke)
    except Exception as error:  # rows are then without their floors
        failed.append(f"ceilings: {type(error).__name__}: {error}")

    def write_choices() -> None:
        if not args.smoke:
            red = correct.red_ops(args.out, device)
            _choices.write(args.out / "choices.json", _choices.entries(benches, store.current(), red))

    plan = deciding(benches) if args.deciding and not args.smoke else [*cells(benches, args.smoke)]
    green: dict[str, bool] = {}
    shape = None
    for bench, case, provider in plan:
        key = dict(zip(KEY, (bench.op, case.mode, provider, case.label, case.dtype), strict=True))
        name = " ".join(key.values())
        cost = cost_of(bench, provider)
        if store.has(**key) or name in attempts.given_up or not deadline.allows(max(cost, 2), name):
            continue
        if shape != (shape := (bench.op, case)):  # the one before is decided, if all of it was measured
            _choices.keep(failed, write_choices)
        try:
            with attempts.row(name, LIMIT + 3 * cost):
                if bench.op not in green:
                    green[bench.op] = is_green(bench.op, args.out, device, args.smoke, not args.deciding)
                    if not green[bench.op]:
                        failed.append(
                            f"{bench.op}: its comparisons fail, so nothing of it was measured (see the stage correct)"
                        )
                if not green[bench.op]:
                    continue
                row = measure(bench, case, provider, device, ceilings, quick=args.smoke)
        except Exception as error:  # the other rows are still worth their time
            failed.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            print(f"kernels: FAILED {failed[-1]}", flush=True)
            continue
        store.add(row)
        show(row)
    _choices.keep(failed, write_choices)
    failed += [" ".join(row[k] for k in KEY) for row in store.current() if row["passed"] != "True"]
    return finish("kernels", deadline, failed)


if __name__ == "__main__":
    sys.exit(main())
