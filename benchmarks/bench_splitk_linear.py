"""A narrow GEMM with the next norm, at few rows: cuBLAS, or sums over slices of K.

Always timed as the pair: partial sums alone would leave out their reduction. The choice table gets "aten" (cuBLAS and
`add_norm`), "triton" (`add_norm` sums the slices) or "finish" (the product does, and `norm` follows), with the number
of slices that the fused model takes; other numbers of slices are measured beside them.

    python benchmarks/bench_splitk_linear.py [--smoke]
"""

import functools
import sys

import torch
import torch.nn.functional as F
from _runner import Bench, Case, Inputs, Maker, Outputs, main

from vtk_kernels._residual_kernel import counters_needed
from vtk_kernels.add_norm import add_norm
from vtk_kernels.linear_residual import linear_residual
from vtk_kernels.norm import norm
from vtk_kernels.splitk_linear import default_splits, splitk_linear

EPS = 1e-6
SPLITS = (2, 4, 8)


def case(t: int, k: int, f: int, **kwargs: object) -> Case:
    # x, w and the residual in, the sum and its norm out
    return Case({"T": t, "K": k, "F": f}, 2 * (t * k + k * f + 3 * t * f), 2 * t * k * f, **kwargs)  # type: ignore[arg-type]


def inputs(case: Case, make: Maker) -> Inputs:
    t, k, f = case.shape.values()
    found = {"x": make(t, k), "w": make(f, k, scale=k**-0.5), "b": make(f, scale=0.5), "residual": make(t, f)}
    return found | {"counters": torch.zeros(counters_needed(t, f), dtype=torch.int32, device=make.device)}


def eager(t: Inputs, case: Case) -> Outputs:
    y = t["residual"] + F.linear(t["x"], t["w"], t["b"])
    return y, F.layer_norm(y, y.shape[-1:], eps=EPS)


def aten(t: Inputs, case: Case) -> Outputs:
    return add_norm(t["residual"], F.linear(t["x"], t["w"], t["b"]), EPS)[:2]


def split(splits: int | None, t: Inputs, case: Case) -> Outputs:
    splits = splits or default_splits(case.shape["T"], case.shape["F"], case.shape["K"])
    return add_norm(t["residual"], None, EPS, splitk_linear(t["x"], t["w"], splits), t["b"])[:2]


def finish(t: Inputs, case: Case) -> Outputs:
    splits = default_splits(case.shape["T"], case.shape["F"], case.shape["K"])
    y, _ = linear_residual(t["x"], t["w"], t["b"], t["residual"], splits, t["counters"])
    return y, norm(y, EPS)[0]


BENCH = Bench(
    op="splitk_linear",
    tests=("tests/kernels/test_splitk_linear.py", "tests/kernels/test_add_norm.py"),
    cases=tuple(
        case(197 * b, k, f, compiled=(b, k) == (1, 3072))
        for k, f in (
            (768, 384), (3072, 384), (1536, 768), (6144, 768), (768, 768), (3072, 768), (384, 384), (1536, 384),
        )
        for b in ((1, 2, 4) if k == 3072 else (1, 4))
    ),
    checks=(case(17, 128, 64), case(5, 1000, 100), case(61, 520, 72)),
    inputs=inputs,
    providers={
        "eager": eager, "aten": aten, "vtk": functools.partial(split, None), "finish": finish,
        **{f"split{s}": functools.partial(split, s) for s in SPLITS},
    },
    choice=lambda c: (c.shape["T"], c.shape["F"], c.shape["K"]),
    answers={"aten": "aten", "vtk": "triton", "finish": "finish"},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(BENCH))
