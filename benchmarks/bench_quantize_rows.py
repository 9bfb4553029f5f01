"""Rows, or GELU of rows, rounded to e4m3 with a scale each.

python benchmarks/bench_quantize_rows.py [--smoke]
"""

import sys

import torch
import torch.nn.functional as F
from _runner import Bench, Case, Inputs, Maker, Outputs, main

from vtk_kernels._dispatch import accumulator
from vtk_kernels.quantize_rows import quantize_rows

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def case(b: int, n: int, c: int, gelu: int = 0) -> Case:
    # reads x, writes one byte a number and a scale a row
    return Case({"B": b, "N": n, "C": c, "gelu": gelu}, 3 * b * n * c + 4 * b * n)


def inputs(case: Case, make: Maker) -> Inputs:
    return {"x": make(case.shape["B"], case.shape["N"], case.shape["C"], scale=2.0) + 0.5}


def eager(t: Inputs, case: Case) -> Outputs:
    x = t["x"].to(accumulator(t["x"].dtype))
    x = F.gelu(x) if case.shape["gelu"] else x
    scale = x.abs().amax(-1) / LARGEST
    return (x / scale[..., None]).to(torch.float8_e4m3fn), scale.float()


def vtk(t: Inputs, case: Case) -> Outputs:
    return quantize_rows(t["x"], gelu=bool(case.shape["gelu"]))


BENCH = Bench(
    op="quantize_rows",
    tests=("tests/kernels/test_e4m3.py",),
    cases=(case(1, 197, 1536, 1), case(8, 197, 3072, 1), case(64, 197, 3072, 1), case(64, 197, 768)),
    checks=(case(2, 17, 64), case(3, 1, 1008, 1), case(2, 577, 192, 1)),
    inputs=inputs, providers={"eager": eager, "vtk": vtk},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(BENCH))
