"""fc1 + bias + GELU in one GEMM: inference, also behind a folded LayerNorm; with GELU′ kept in a byte; the backward.

The choice table gets "triton", "aten" (cuBLAS, then an elementwise kernel) or "cublaslt" (GELU by tanh in the epilogue
of cuBLASLt's product) for each shape of the forward.

    python benchmarks/bench_linear_gelu.py [--smoke]
"""

import math
import sys

import torch
import torch.nn.functional as F
from _runner import Bench, Case, Inputs, Maker, Outputs, main
from torch import Tensor

from vtk_kernels.linear_gelu import linear_gelu, linear_gelu_backward
from vtk_kernels.row_stats import pieces_of, row_stats_ref

TESTS = ("tests/kernels/test_linear_gelu.py",)
EPS = 1e-6
LOW, SPAN = -0.1291, 1.2582
"""GELU′ lies inside [LOW, LOW + SPAN]; a byte holds it to half of SPAN / 255."""


def case(t: int, k: int, f: int, *, packed: int = 0, stats: int = 0, mode: str = "forward", **kwargs: object) -> Case:
    # the gradient multiplies for u again, and for those of x and w
    passes = 1 if mode == "forward" else 3
    size = passes * (2 * (t * k + k * f + f + t * f) + packed * t * f + 8 * stats * t * pieces_of(k))
    shape = {"T": t, "K": k, "F": f, "packed": packed, "stats": stats}
    return Case(shape, size, passes * 2 * t * k * f, mode=mode, **kwargs)  # type: ignore[arg-type]


def inputs(case: Case, make: Maker) -> Inputs:
    t, k, f, _, stats = case.shape.values()
    found = {"x": make(t, k), "w": make(f, k, scale=k**-0.5), "b": make(f, scale=0.5)}
    if not stats:
        return found
    w = found["w"].float()
    return found | {"w": (w - w.mean(1, keepdim=True)).to(make.dtype), "row_stats": row_stats_ref(found["x"])}


def derivative(u: Tensor) -> Tensor:
    """GELU′ with the error function."""
    return 0.5 * (1 + torch.erf(u / math.sqrt(2))) + u * torch.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)


def eager(t: Inputs, case: Case) -> Outputs:
    x = F.layer_norm(t["x"], t["x"].shape[-1:], eps=EPS) if case.shape["stats"] else t["x"]
    u = F.linear(x, t["w"], t["b"])
    if not case.shape["packed"]:
        return F.gelu(u)
    slope = derivative(u.to(torch.promote_types(u.dtype, torch.float32)))
    return F.gelu(u), ((slope - LOW) * (255 / SPAN)).round().to(torch.uint8)


def vtk(t: Inputs, case: Case) -> Outputs:
    if case.shape["stats"]:
        return linear_gelu(t["x"], t["w"], t["b"], row_stats=t["row_stats"], eps=EPS)
    return linear_gelu(t["x"], t["w"], t["b"], bool(case.shape["packed"]))


def cublaslt(t: Inputs, case: Case) -> Tensor:
    return torch._addmm_activation(t["b"], t["x"], t["w"].T, use_gelu=True)


def plain(case: Case) -> bool:
    """Whether a case is a product, a bias and GELU, and nothing else."""
    return case.mode == "forward" and not case.shape["packed"] and not case.shape["stats"]


BENCH = Bench(
    op="linear_gelu", tests=TESTS,
    cases=(
        # whole images, and the few pooled rows of a last block
        *(case(197 * b, 384, 3072) for b in (1, 4, 8, 64, 256)), *(case(197 * b, 768, 6144) for b in (1, 8, 64, 256)),
        *(case(197 * b, 768, 3072) for b in (1, 8, 256)), case(197 * 64, 768, 3072, compiled=True),
        *(case(197 * b, 384, 1536) for b in (1, 8, 64, 256)), *(case(577 * b, 768, 3072) for b in (1, 8)),
        *(case(t, k, f) for k, f in ((384, 3072), (768, 6144), (768, 3072)) for t in (1, 8, 64)),
        case(577 * 32, 768, 3072, packed=1),
        *(case(197 * b, k, f, stats=1) for k, f in ((384, 3072), (768, 6144)) for b in (1, 8, 64)),
    ),
    checks=(
        case(17, 64, 128), case(34, 64, 256, packed=1), case(5, 1000, 100), case(394, 100, 320, stats=1),
        case(197, 384, 1536, stats=1), case(197, 384, 1536, mode="backward"),
    ),
    inputs=inputs, providers={"eager": eager, "vtk": vtk, "cublaslt": cublaslt}, gradients=("x", "w", "b"),
    choice=lambda c: (c.shape["T"], c.shape["F"], c.shape["K"]) if plain(c) else None,
    answers={"eager": "aten", "vtk": "triton", "cublaslt": "cublaslt"}, takes={"cublaslt": plain},
)  # fmt: skip


def back_case(t: int, c: int, f: int, **kwargs: object) -> Case:
    return Case({"T": t, "C": c, "F": f}, 2 * (t * c + c * f + t * f) + t * f, 2 * t * c * f, **kwargs)  # type: ignore[arg-type]


def back_inputs(case: Case, make: Maker) -> Inputs:
    t, c, f = case.shape.values()
    q = torch.randint(0, 256, (t, f), device=make.device, dtype=torch.uint8)
    return {"g": make(t, c), "w2": make(c, f, scale=c**-0.5), "q": q}


def back_eager(t: Inputs, case: Case) -> Tensor:
    return (t["g"] @ t["w2"]) * (t["q"].to(t["g"].dtype) * (SPAN / 255) + LOW)


def back_vtk(t: Inputs, case: Case) -> Tensor:
    return linear_gelu_backward(t["g"], t["w2"], t["q"])


BACKWARD = Bench(
    op="linear_gelu_backward", tests=TESTS,
    cases=(back_case(197 * 64, 384, 1536), back_case(577 * 32, 768, 3072, compiled=True)),
    checks=(back_case(17, 64, 128), back_case(5, 100, 1000)),
    inputs=back_inputs, providers={"eager": back_eager, "vtk": back_vtk},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(max(main(BENCH), main(BACKWARD)))
