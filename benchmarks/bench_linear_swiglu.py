"""fc1 of a SwiGLU MLP in one GEMM: also behind a folded norm, with statistics for a sub-norm, with codes; the backward.

The choice table gets "triton" or "aten" (cuBLAS, then SiLU and the product with the value) for each shape of the
forward. Shapes: EVA-02 B/14 at 224 px, DINOv3 S/16+ and H/16+ at 256 px, DINOv2 g/14 at 224 px.

    python benchmarks/bench_linear_swiglu.py [--smoke]
"""

import sys

import torch
import torch.nn.functional as F
from _runner import Bench, Case, Inputs, Maker, Outputs, main
from torch import Tensor

from vtk_kernels.linear_swiglu import linear_swiglu, linear_swiglu_backward
from vtk_kernels.row_stats import pieces_of, row_stats_ref

TESTS = ("tests/kernels/test_linear_swiglu.py",)
EPS = 1e-6
NORMS = ("", "LayerNorm", "RMSNorm")
"""In front, by the number in a case."""


def case(
    t: int, k: int, f: int, *, norm: int = 0, stats: int = 0, packed: int = 0, mode: str = "forward", **kwargs: object
) -> Case:
    # the gradient multiplies for gate and value again, and for those of x and w
    passes = 1 if mode == "forward" else 3
    pieces = pieces_of(k) * (norm > 0) + pieces_of(f) * (stats + packed)
    size = passes * (2 * (t * k + 2 * k * f + 2 * f + t * f) + 2 * packed * t * f + 8 * t * pieces)
    shape = {"T": t, "K": k, "F": f, "norm": norm, "stats": stats, "packed": packed}
    return Case(shape, size, passes * 4 * t * k * f, mode=mode, **kwargs)  # type: ignore[arg-type]


def inputs(case: Case, make: Maker) -> Inputs:
    t, k, f, norm, *_ = case.shape.values()
    found = {"x": make(t, k) + 0.5, "w": make(2 * f, k, scale=k**-0.5), "b": make(2 * f, scale=0.5)}
    if NORMS[norm] == "LayerNorm":
        w = found["w"].float()
        found["w"] = (w - w.mean(1, keepdim=True)).to(make.dtype)
    return found | ({"row_stats": row_stats_ref(found["x"])} if norm else {})


def codes(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers about 128, and the scale of each 64 columns."""
    found = []
    for piece in factors.split(64, -1):
        scale = piece.abs().amax(-1, keepdim=True) / 127
        found.append(((piece / scale + 128.5).floor().to(torch.uint8), scale))
    return torch.cat([c for c, _ in found], -1), torch.cat([s for _, s in found], -1)


def eager(t: Inputs, case: Case) -> Outputs:
    x, norm = t["x"], NORMS[case.shape["norm"]]
    if norm:
        shape = x.shape[-1:]
        x = F.layer_norm(x, shape, eps=EPS) if norm == "LayerNorm" else F.rms_norm(x, shape, eps=EPS)
    gate, value = F.linear(x, t["w"], t["b"]).chunk(2, -1)
    y = F.silu(gate) * value
    if case.shape["stats"]:
        return y, row_stats_ref(y)
    if not case.shape["packed"]:
        return y
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, v = gate.to(wide), value.to(wide)
    bell = torch.sigmoid(g)
    (q, s), (p, r) = codes(v * (bell + g * bell * (1 - bell))), codes(g * bell)
    return y, torch.cat([q, p], -1), torch.stack([s, r], -1)


def vtk(t: Inputs, case: Case) -> Outputs:
    if case.shape["packed"]:
        return linear_swiglu(t["x"], t["w"], t["b"], save_grad=True)
    known = {"row_stats": t["row_stats"], "eps": EPS, "rms": case.shape["norm"] == 2} if case.shape["norm"] else {}
    return linear_swiglu(t["x"], t["w"], t["b"], stats=bool(case.shape["stats"]), **known)  # type: ignore[call-overload, no-any-return]


def plain(case: Case) -> bool:
    """Whether a case is a product, its bias and the gate, and nothing else."""
    return case.mode == "forward" and not any(case.shape[name] for name in ("norm", "stats", "packed"))


BENCH = Bench(
    op="linear_swiglu", tests=TESTS,
    cases=(
        *(case(257 * b, 768, 2048) for b in (1, 8, 64)), *(case(261 * b, 384, 1536) for b in (1, 8, 64)),
        *(case(261 * b, 1280, 5120) for b in (1, 8)), case(257 * 8, 1536, 4096), case(257 * 64, 768, 2048, packed=1),
        *(case(257 * b, 768, 2048, norm=1, stats=1) for b in (1, 8, 64)),
    ),
    checks=(
        case(17, 64, 128), case(34, 64, 256, packed=1), case(257, 192, 512, norm=1, stats=1),
        case(70, 100, 144, norm=2), case(394, 128, 320, stats=1), case(197, 384, 512, mode="backward"),
    ),
    inputs=inputs, providers={"eager": eager, "vtk": vtk}, gradients=("x", "w", "b"),
    choice=lambda c: (c.shape["T"], 2 * c.shape["F"], c.shape["K"]) if plain(c) else None,
    answers={"eager": "aten", "vtk": "triton"},
)  # fmt: skip


def back_case(t: int, c: int, f: int, **kwargs: object) -> Case:
    size = 2 * (t * c + c * f + 2 * t * f) + 2 * t * f + 8 * t * pieces_of(f)
    return Case({"T": t, "C": c, "F": f}, size, 2 * t * c * f, **kwargs)  # type: ignore[arg-type]


def back_inputs(case: Case, make: Maker) -> Inputs:
    t, c, f = case.shape.values()
    q = torch.randint(0, 256, (t, 2 * f), device=make.device, dtype=torch.uint8)
    scales = torch.rand(t, pieces_of(f), 2, device=make.device) / 127
    wide = torch.promote_types(make.dtype, torch.float32)
    return {"g": make(t, c), "w2": make(c, f, scale=c**-0.5), "q": q, "scales": scales.to(wide)}


def back_eager(t: Inputs, case: Case) -> Tensor:
    gy, f = t["g"] @ t["w2"], case.shape["F"]
    each = t["scales"].repeat_interleave(64, 1)[:, :f]
    factors = (t["q"].to(each.dtype) - 128) * torch.cat([each[..., 0], each[..., 1]], -1)
    return torch.cat([gy, gy], -1) * factors.to(gy.dtype)


def back_vtk(t: Inputs, case: Case) -> Tensor:
    return linear_swiglu_backward(t["g"], t["w2"], t["q"], t["scales"])


BACKWARD = Bench(
    op="linear_swiglu_backward", tests=TESTS,
    cases=(back_case(257 * 64, 768, 2048),),
    checks=(back_case(17, 64, 128), back_case(5, 100, 1008)),
    inputs=back_inputs, providers={"eager": back_eager, "vtk": back_vtk},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(max(main(BENCH), main(BACKWARD)))
