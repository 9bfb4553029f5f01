"""Residual addition and LayerNorm or RMSNorm without affine in one pass, forward and backward.

python benchmarks/bench_add_norm.py [--smoke]
"""

import sys

import torch
import torch.nn.functional as F
from _runner import Bench, Case, Inputs, Maker, Outputs, main

from vtk_kernels.add_norm import add_norm

EPS = 1e-6


def case(b: int, n: int, c: int, mode: str = "forward", rms: int = 0, **kwargs: object) -> Case:
    # reads x and r, writes y and x̂; the gradient reads gy, gh and x̂, writes one tensor for both
    return Case({"B": b, "N": n, "C": c, "rms": rms}, 4 * b * n * c * 2 + 4 * b * n, mode=mode, **kwargs)  # type: ignore[arg-type]


def inputs(case: Case, make: Maker) -> Inputs:
    shape = list(case.shape.values())[:3]
    return {"x": make(*shape, scale=2.0) + 0.5, "r": make(*shape)}


def eager(t: Inputs, case: Case) -> Outputs:
    y = t["x"] + t["r"]
    shape = y.shape[-1:]
    return y, F.rms_norm(y, shape, eps=EPS) if case.shape["rms"] else F.layer_norm(y, shape, eps=EPS)


def vtk(t: Inputs, case: Case) -> Outputs:
    return add_norm(t["x"], t["r"], EPS, rms=bool(case.shape["rms"]))


def reference(t: Inputs, case: Case) -> Outputs:
    y, hat = eager(t, case)
    wide = y.to(torch.promote_types(y.dtype, torch.float32))
    spread = wide.square().mean(-1) if case.shape["rms"] else wide.var(-1, unbiased=False)
    return y, hat, (spread + EPS).rsqrt()


BENCH = Bench(
    op="add_norm",
    tests=("tests/kernels/test_add_norm.py",),
    cases=(
        case(1, 197, 384), case(8, 197, 384), case(64, 197, 384, compiled=True), case(64, 197, 768),
        case(256, 197, 768), case(64, 197, 768, "backward", compiled=True),
    ),
    checks=(case(2, 17, 64), case(3, 1, 1000), case(2, 577, 192), case(2, 17, 384, "backward"),
            case(2, 17, 320, rms=1), case(2, 17, 384, "backward", rms=1)),
    inputs=inputs, providers={"eager": eager, "vtk": vtk}, reference=reference, gradients=("x", "r"),
    differentiable=2,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(BENCH))
