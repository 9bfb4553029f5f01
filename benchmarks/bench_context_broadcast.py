"""Context Broadcasting (Hyeon-Woo et al. 2023) with its residual addition: CB and CB_S, forward, statistics, backward.

python benchmarks/bench_context_broadcast.py [--smoke]
"""

import sys

from _runner import Bench, Case, Inputs, Maker, Outputs, main
from torch import Tensor

from vtk_kernels.context_broadcast import context_broadcast
from vtk_kernels.row_stats import pieces_of, row_stats_ref


def case(b: int, n: int, c: int, *, scaled: int = 0, stats: int = 0, mode: str = "forward", **kwargs: object) -> Case:
    shape = {"B": b, "N": n, "C": c, "scaled": scaled, "stats": stats}
    units = 3 if mode == "forward" else 2 + scaled  # x, m → y; the gradient g → gm, with m for the scale's own
    return Case(shape, units * b * n * c * 2 + 8 * b * n * pieces_of(c) * stats, mode=mode, **kwargs)  # type: ignore[arg-type]


def inputs(case: Case, make: Maker) -> Inputs:
    b, n, c, scaled, _ = case.shape.values()
    found = {"x": make(b, n, c), "m": make(b, n, c) + 0.5}
    return found | ({"scale": make(c, scale=0.5)} if scaled else {})


def eager(t: Inputs, case: Case) -> Tensor:
    mean = t["m"].mean(1, keepdim=True)
    if case.shape["scaled"]:
        return t["x"] + (t["m"] + t["scale"] * mean)
    return t["x"] + 0.5 * (t["m"] + mean)


def vtk(t: Inputs, case: Case) -> Outputs:
    return context_broadcast(t["x"], t["m"], t.get("scale"), stats=bool(case.shape["stats"]))


def reference(t: Inputs, case: Case) -> Outputs:
    y = eager(t, case)
    return (y, row_stats_ref(y)) if case.shape["stats"] else y


BENCH = Bench(
    op="context_broadcast",
    tests=("tests/kernels/test_context_broadcast.py",),
    cases=(
        case(1, 197, 384), case(8, 197, 384), case(64, 197, 384, compiled=True), case(64, 197, 768),
        *(case(b, 197, c, stats=1) for b, c in ((1, 384), (8, 384), (64, 384), (64, 768))),
        case(64, 197, 768, scaled=1), case(8, 577, 768),
        case(64, 197, 384, mode="backward", compiled=True),
    ),
    checks=(
        case(2, 17, 64), case(3, 1, 192, stats=1), case(2, 577, 1000, scaled=1), case(2, 17, 64, scaled=1, stats=1),
        case(2, 17, 384, mode="backward"),
    ),
    inputs=inputs, providers={"eager": eager, "vtk": vtk}, reference=reference, gradients=("x", "m"),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(BENCH))
