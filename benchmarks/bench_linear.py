"""qkv as a linear layer behind a folded LayerNorm, from statistics of its rows; and without one.

"eager" normalises with a kernel of its own, which reads x and writes it again. Without statistics it is cuBLAS alone:
what a block pays here whose rows `add_norm` normalised.

    python benchmarks/bench_linear.py [--smoke]
"""

import sys

import torch.nn.functional as F
from _runner import Bench, Case, Inputs, Maker, Outputs, main

from vtk_kernels.linear import linear
from vtk_kernels.row_stats import pieces_of, row_stats_ref

EPS = 1e-6


def case(t: int, k: int, f: int, *, stats: int = 1, **kwargs: object) -> Case:
    size = 2 * (t * k + k * f + f + t * f) + 8 * stats * t * pieces_of(k)
    return Case({"T": t, "K": k, "F": f, "stats": stats}, size, 2 * t * k * f, **kwargs)  # type: ignore[arg-type]


def inputs(case: Case, make: Maker) -> Inputs:
    t, k, f, stats = case.shape.values()
    found = {"x": make(t, k), "w": make(f, k, scale=k**-0.5), "b": make(f, scale=0.5)}
    if not stats:
        return found
    w = found["w"].float()
    return found | {"w": (w - w.mean(1, keepdim=True)).to(make.dtype), "row_stats": row_stats_ref(found["x"])}


def eager(t: Inputs, case: Case) -> Outputs:
    x = F.layer_norm(t["x"], t["x"].shape[-1:], eps=EPS) if case.shape["stats"] else t["x"]
    return F.linear(x, t["w"], t["b"])


def vtk(t: Inputs, case: Case) -> Outputs:
    stats = t.get("row_stats")
    return linear(t["x"], t["w"], t["b"], stats, None if stats is None else EPS)


BENCH = Bench(
    op="linear", tests=("tests/kernels/test_linear.py",),
    cases=tuple(
        case(197 * b, k, f, stats=stats, compiled=(b, k, stats) == (64, 384, 1))
        for k, f in ((384, 2304), (768, 4608), (768, 2304)) for b in (1, 8, 64) for stats in (1, 0)
    ),
    checks=(case(17, 64, 128), case(5, 1000, 100), case(394, 100, 320), case(61, 128, 72, stats=0)),
    inputs=inputs, providers={"eager": eager, "vtk": vtk},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(BENCH))
