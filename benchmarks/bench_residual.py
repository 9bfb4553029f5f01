"""The end of a block's half: product, bias, residual and the LayerNorm that follows, as two kernels in either way.

"separate" is cuBLAS and `add_norm`; "addmm" a product that adds to the residual stream (β = 1), and `norm`, which adds
the biases that the stream is kept without. The choice table gets one of them; a model takes the latter if all its
shapes do.

    python benchmarks/bench_residual.py [--smoke]
"""

import sys

import torch
import torch.nn.functional as F
from _runner import Bench, Case, Inputs, Maker, Outputs, main

from vtk_kernels.add_norm import add_norm
from vtk_kernels.norm import norm

EPS = 1e-6


def case(t: int, k: int, c: int, **kwargs: object) -> Case:
    # x is read and normalised; the stream itself comes out with its bias in one way and without it in the other
    return Case({"T": t, "K": k, "C": c}, 2 * (t * k + k * c + c + 2 * t * c), 2 * t * k * c, **kwargs)  # type: ignore[arg-type]


def inputs(case: Case, make: Maker) -> Inputs:
    t, k, c = case.shape.values()
    return {"a": make(t, k), "w": make(c, k, scale=k**-0.5), "b": make(c, scale=0.5), "x": make(t, c) + 0.5}


def eager(t: Inputs, case: Case) -> Outputs:
    return F.layer_norm(t["x"] + F.linear(t["a"], t["w"], t["b"]), t["x"].shape[-1:], eps=EPS)


def separate(t: Inputs, case: Case) -> Outputs:
    return add_norm(t["x"], F.linear(t["a"], t["w"], t["b"]), EPS)[1]


def addmm(t: Inputs, case: Case) -> Outputs:
    # in place, as in the model: out of place torch copies x by a kernel of its own. Scaled by half the stream neither
    # grows nor vanishes over many calls, and the product's time does not depend on the factor
    if t["x"].is_cuda and torch.cuda.is_current_stream_capturing():
        return norm(t["x"].addmm_(t["a"], t["w"].T, beta=0.5), EPS, t["b"])[0]
    return norm(torch.addmm(t["x"], t["a"], t["w"].T), EPS, t["b"])[0]


BENCH = Bench(
    op="residual", tests=("tests/kernels/test_norm.py", "tests/kernels/test_add_norm.py"),
    cases=tuple(
        case(197 * b, k, c)
        # out-projection and fc2 of one and two branches of S and of B
        for k, c in (
            (384, 384), (1536, 384), (768, 384), (3072, 384), (768, 768), (3072, 768), (1536, 768), (6144, 768),
        ) for b in (8, 64, 256)
    ),
    checks=(case(17, 128, 64), case(5, 1000, 100), case(197, 96, 384), case(577, 64, 192)),
    inputs=inputs, providers={"eager": eager, "separate": separate, "addmm": addmm},
    choice=lambda c: (c.shape["T"], c.shape["C"], c.shape["K"]), answers={"separate": "separate", "addmm": "addmm"},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(BENCH))
