"""Output projection or fc2 with bias, residual, and statistics of the sum's rows in one GEMM.

"eager" is a product that adds to the residual and then the statistics, in plain torch. "aten" is what a block with
norms of its own does instead: cuBLAS, then `add_norm`, which also normalises for the next product. Where tiles are too
few to fill a card the choice table gets "whole" or "finish": K in slices whose last program finishes its tile. With
"sub" a LayerNorm stands before the product, folded into it, as before the fc2 of EVA-02.

    python benchmarks/bench_linear_residual.py [--smoke]
"""

import sys

import torch
import torch.nn.functional as F
from _runner import Bench, Case, Inputs, Maker, Outputs, main

from vtk_kernels._residual_kernel import counters_needed
from vtk_kernels.add_norm import add_norm
from vtk_kernels.linear_residual import linear_residual
from vtk_kernels.row_stats import pieces_of, row_stats_ref
from vtk_kernels.splitk_linear import default_splits

EPS = 1e-6


def case(t: int, k: int, c: int, *, sub: int = 0, **kwargs: object) -> Case:
    size = 2 * (t * k + k * c + c + 2 * t * c) + 8 * t * (pieces_of(c) + sub * pieces_of(k))
    return Case({"T": t, "K": k, "C": c, "sub": sub}, size, 2 * t * k * c, **kwargs)  # type: ignore[arg-type]


def inputs(case: Case, make: Maker) -> Inputs:
    t, k, c, sub = case.shape.values()
    found = {"a": make(t, k), "w": make(c, k, scale=k**-0.5), "b": make(c, scale=0.5), "x": make(t, c) + 0.5}
    if sub:
        w = found["w"].float()
        found["w"] = (w - w.mean(1, keepdim=True)).to(make.dtype)
        found["row_stats"] = row_stats_ref(found["a"])
    return found | {"counters": torch.zeros(counters_needed(t, c), dtype=torch.int32, device=make.device)}


def normalised(t: Inputs, case: Case) -> torch.Tensor:
    """The product's input, behind the sub-norm where there is one."""
    return F.layer_norm(t["a"], t["a"].shape[-1:], eps=EPS) if case.shape["sub"] else t["a"]


def eager(t: Inputs, case: Case) -> Outputs:
    y = torch.addmm(t["x"] + t["b"], normalised(t, case), t["w"].T)
    return y, row_stats_ref(y)


def aten(t: Inputs, case: Case) -> Outputs:
    return add_norm(t["x"], F.linear(normalised(t, case), t["w"], t["b"]), EPS)[0]


def vtk(t: Inputs, case: Case) -> Outputs:
    stats = t.get("row_stats")
    return linear_residual(t["a"], t["w"], t["b"], t["x"], row_stats=stats, eps=None if stats is None else EPS)


def splits(case: Case) -> int:
    return default_splits(case.shape["T"], case.shape["C"], case.shape["K"])


def finish(t: Inputs, case: Case) -> Outputs:
    stats = t.get("row_stats")
    eps = None if stats is None else EPS
    return linear_residual(t["a"], t["w"], t["b"], t["x"], splits(case), t["counters"], stats, eps)


def choice(case: Case) -> tuple[int, int, int] | None:
    """What the choice table is about: a product that would be cut."""
    plain = splits(case) > 1 and not case.shape["sub"]
    return (case.shape["T"], case.shape["C"], case.shape["K"]) if plain else None


BENCH = Bench(
    op="linear_residual", tests=("tests/kernels/test_linear_residual.py", "tests/kernels/test_finishing_slices.py"),
    cases=(
        *(case(197 * b, k, c, compiled=(b, k, c) == (64, 3072, 384))
        # out-projection and fc2 of two branches of S and of B, and of one branch of B
        for k, c in ((768, 384), (3072, 384), (1536, 768), (6144, 768), (768, 768), (3072, 768)) for b in (1, 4, 64)),
        *(case(257 * b, 2048, 768, sub=1) for b in (1, 8, 64)),
    ),
    checks=(case(17, 128, 64), case(5, 1000, 100), case(61, 520, 72), case(197, 96, 384), case(577, 64, 192),
            case(17, 520, 72, sub=1), case(130, 2048, 192, sub=1)),
    inputs=inputs, providers={"eager": eager, "aten": aten, "vtk": vtk, "finish": finish},
    choice=choice, answers={"vtk": "whole", "finish": "finish"},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(BENCH))
