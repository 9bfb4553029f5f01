"""qkv as a linear layer behind a folded LayerNorm or RMSNorm, from statistics of its rows; and without one.

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


def case(t: int, k: int, f: int, *, stats: int = 1, rms: int = 0, **kwargs: object) -> Case:
    size = 2 * (t * k + k * f + f + t * f) + 8 * stats * t * pieces_of(k)
    return Case({"T": t, "K": k, "F": f, "stats": stats, "rms": rms}, size, 2 * t * k * f, **kwargs)  # type: ignore[arg-type]


def inputs(case: Case, make: Maker) -> Inputs:
    t, k, f, stats, rms = case.shape.values()
    found = {"x": make(t, k), "w": make(f, k, scale=k**-0.5), "b": make(f, scale=0.5)}
    if not stats:
        return found
    w = found["w"].float()
    folded = found["w"] if rms else (w - w.mean(1, keepdim=True)).to(make.dtype)
    return found | {"w": folded, "row_stats": row_stats_ref(found["x"])}


def eager(t: Inputs, case: Case) -> Outputs:
    x, shape = t["x"], t["x"].shape[-1:]
    if case.shape["stats"]:
        x = F.rms_norm(x, shape, eps=EPS) if case.shape["rms"] else F.layer_norm(x, shape, eps=EPS)
    return F.linear(x, t["w"], t["b"])


def vtk(t: Inputs, case: Case) -> Outputs:
    stats = t.get("row_stats")
    return linear(t["x"], t["w"], t["b"], stats, None if stats is None else EPS, bool(case.shape["rms"]))


BENCH = Bench(
    op="linear", tests=("tests/kernels/test_linear.py",),
    cases=tuple(
        case(197 * b, k, f, stats=stats, compiled=(b, k, stats) == (64, 384, 1))
        for k, f in ((384, 2304), (768, 4608), (768, 2304)) for b in (1, 8, 64) for stats in (1, 0)
    ),
    checks=(case(17, 64, 128), case(5, 1000, 100), case(394, 100, 320), case(61, 128, 72, stats=0),
            case(17, 320, 128, rms=1)),
    inputs=inputs, providers={"eager": eager, "vtk": vtk},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(BENCH))
