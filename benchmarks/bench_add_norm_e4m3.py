"""Residual addition, LayerNorm without affine and its rounding to e4m3 with a scale per row, in one pass.

python benchmarks/bench_add_norm_e4m3.py [--smoke]
"""

import sys

import torch
import torch.nn.functional as F
from _runner import Bench, Case, Inputs, Maker, Outputs, main

from vtk_kernels._dispatch import accumulator
from vtk_kernels.add_norm_e4m3 import add_norm_e4m3

EPS = 1e-6
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def case(b: int, n: int, c: int) -> Case:
    # reads x and r, writes y, one byte a number for the codes, and a scale a row
    return Case({"B": b, "N": n, "C": c}, 7 * b * n * c + 4 * b * n)


def inputs(case: Case, make: Maker) -> Inputs:
    return {"x": make(*case.shape.values(), scale=2.0) + 0.5, "r": make(*case.shape.values())}


def eager(t: Inputs, case: Case) -> Outputs:
    y = t["x"] + t["r"]
    norm = F.layer_norm(y.to(accumulator(y.dtype)), y.shape[-1:], eps=EPS)
    scale = norm.abs().amax(-1) / LARGEST
    return y, (norm / scale[..., None]).to(torch.float8_e4m3fn), scale.float()


def vtk(t: Inputs, case: Case) -> Outputs:
    return add_norm_e4m3(t["x"], t["r"], EPS)


BENCH = Bench(
    op="add_norm_e4m3",
    tests=("tests/kernels/test_e4m3.py",),
    cases=(case(1, 197, 384), case(8, 197, 768), case(64, 197, 768)),
    checks=(case(2, 17, 64), case(3, 1, 1008), case(2, 577, 192)),
    inputs=inputs, providers={"eager": eager, "vtk": vtk},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(BENCH))
