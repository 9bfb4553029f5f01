"""LayerNorm and RMSNorm without affine, forward and backward.

python benchmarks/bench_norm.py [--smoke]
"""

import sys

import torch
import torch.nn.functional as F
from _runner import Bench, Case, Inputs, Maker, Outputs, main
from torch import Tensor

from vtk_kernels.norm import norm

EPS = 1e-6


def case(b: int, n: int, c: int, mode: str = "forward", rms: int = 0, **kwargs: object) -> Case:
    units = 2 if mode == "forward" else 3  # reads x, writes x̂; the gradient reads g and x̂
    return Case({"B": b, "N": n, "C": c, "rms": rms}, units * b * n * c * 2 + 4 * b * n, mode=mode, **kwargs)  # type: ignore[arg-type]


def inputs(case: Case, make: Maker) -> Inputs:
    return {"x": make(*list(case.shape.values())[:3], scale=2.0) + 0.5}


def eager(t: Inputs, case: Case) -> Tensor:
    shape = t["x"].shape[-1:]
    return F.rms_norm(t["x"], shape, eps=EPS) if case.shape["rms"] else F.layer_norm(t["x"], shape, eps=EPS)


def vtk(t: Inputs, case: Case) -> Outputs:
    return norm(t["x"], EPS, rms=bool(case.shape["rms"]))


def reference(t: Inputs, case: Case) -> Outputs:
    wide = t["x"].to(torch.promote_types(t["x"].dtype, torch.float32))
    spread = wide.square().mean(-1) if case.shape["rms"] else wide.var(-1, unbiased=False)
    return eager(t, case), (spread + EPS).rsqrt()


BENCH = Bench(
    op="norm",
    tests=("tests/kernels/test_norm.py",),
    cases=(
        case(1, 197, 384), case(8, 197, 384), case(64, 197, 384, compiled=True), case(64, 197, 768),
        case(256, 197, 768), case(64, 197, 768, "backward", compiled=True),
    ),
    checks=(case(2, 17, 64), case(3, 1, 1000), case(2, 577, 192), case(2, 17, 384, "backward"),
            case(2, 17, 320, rms=1), case(2, 17, 384, "backward", rms=1)),
    inputs=inputs, providers={"eager": eager, "vtk": vtk}, reference=reference, gradients=("x",),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(BENCH))
