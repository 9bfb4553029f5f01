"""Attention over one packed QKV matrix with the heads of all branches: whole batches, and segments of many lengths.

Against SDPA on the same packed matrix; the choice table gets "triton", "short" (all keys of an image at once, up to
288) or "sdpa" for each shape of whole batches.

    python benchmarks/bench_packed_attention.py [--smoke]
"""

import itertools
import sys

import torch
import torch.nn.functional as F
from _runner import Bench, Case, Inputs, Maker, main
from torch import Tensor

from vtk_kernels._short_attention import fits, short_attention
from vtk_kernels.packed_attention import packed_attention

LENGTHS = (50, 197, 577, 197)
"""Lengths of segments, repeated: images of 112, 224 and 384 pixels."""


def case(b: int, n: int, h: int, d: int = 64, *, queries: int = 0, scaled: int = 0, **kwargs: object) -> Case:
    asked = queries or n
    passes = 1 if kwargs.get("mode") != "backward" else 2
    moved = passes * 2 * b * h * d * (2 * asked + 2 * n) + 4 * b * n * scaled
    shape = {"B": b, "N": n, "H": h, "D": d, "queries": queries, "scaled": scaled}
    return Case(shape, moved, passes * 4 * b * h * asked * n * d, **kwargs)  # type: ignore[arg-type]


def segments(count: int, h: int, d: int = 64, **kwargs: object) -> Case:
    lengths = segment_lengths(count)
    shape = {"segments": count, "T": sum(lengths), "H": h, "D": d}
    return Case(shape, 8 * sum(lengths) * h * d, 4 * h * d * sum(n * n for n in lengths), **kwargs)  # type: ignore[arg-type]


def segment_lengths(count: int) -> list[int]:
    return list(itertools.islice(itertools.cycle(LENGTHS), count))


def inputs(case: Case, make: Maker) -> Inputs:
    h, d = case.shape["H"], case.shape["D"]
    if "segments" in case.shape:
        lengths = segment_lengths(case.shape["segments"])
        return {"qkv": make(sum(lengths), 3 * h * d), "cu_seqlens": make.offsets(lengths)}
    b, n = case.shape["B"], case.shape["N"]
    found = {"qkv": make(b, n, 3 * h * d)}
    if case.shape["scaled"]:
        found |= {"row_scale": 1 + 0.2 * make(b, n, dtype=torch.float32), "bias": make(3 * h * d, scale=0.5)}
    return found


def attend(qkv: Tensor, case: Case, queries: int = 0) -> Tensor:
    """SDPA on (B, N, 3·H·D); the first ``queries`` tokens ask, all if 0."""
    h, d = case.shape["H"], case.shape["D"]
    q, k, v = (t.unflatten(-1, (h, d)).transpose(1, 2) for t in qkv.chunk(3, -1))  # (B, H, N, D)
    found = F.scaled_dot_product_attention(q[:, :, :queries] if queries else q, k, v, scale=d**-0.5)
    return found.transpose(1, 2).flatten(2)


def eager(t: Inputs, case: Case) -> Tensor:
    if "segments" not in case.shape:
        qkv = t["qkv"]
        if case.shape["scaled"]:  # the norm's scale and the bias behind a product of raw tokens
            qkv = qkv * t["row_scale"].to(qkv.dtype)[..., None] + t["bias"]
        return attend(qkv, case, case.shape["queries"])
    parts = t["qkv"].split(segment_lengths(case.shape["segments"]))
    return torch.cat([attend(part[None], case)[0] for part in parts])


def triton(t: Inputs, case: Case) -> Tensor:
    """The kernel, whatever the choice table says; on a CPU and for gradients what the operation does by itself."""
    use_triton = True if t["qkv"].is_cuda and case.mode == "forward" else None
    scale = case.shape["D"] ** -0.5
    if "segments" in case.shape:
        longest = max(segment_lengths(case.shape["segments"]))
        return packed_attention(
            t["qkv"], case.shape["H"], t["cu_seqlens"], scale=scale, max_seqlen=longest, use_triton=use_triton
        )
    queries = case.shape["queries"] or None
    return packed_attention(
        t["qkv"], case.shape["H"], None, queries, scale, t.get("row_scale"), t.get("bias"), use_triton=use_triton
    )


def short(t: Inputs, case: Case) -> Tensor:
    """The kernel for few keys; on a CPU what the operation does by itself."""
    qkv, h, queries, scale = t["qkv"], case.shape["H"], case.shape["queries"] or None, case.shape["D"] ** -0.5
    if qkv.is_cuda:
        return short_attention(qkv, h, queries, scale, t.get("row_scale"), t.get("bias"))
    return packed_attention(qkv, h, None, queries, scale, t.get("row_scale"), t.get("bias"))


def few_keys(case: Case) -> bool:
    """Whether `short` can run a case; what the rows of a matrix of these heads look like is the same for any batch."""
    if "segments" in case.shape or case.mode == "backward":
        return False
    n, h, d, scaled = (case.shape[name] for name in ("N", "H", "D", "scaled"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return fits(torch.empty(1, n, 3 * h * d, dtype=torch.bfloat16, device=device), h, d**-0.5, bool(scaled))


def choice(case: Case) -> tuple[int, int, int] | None:
    """What the choice table is about: whole images, all tokens queries, 64 channels a head."""
    shape = case.shape
    if "segments" in shape or shape["queries"] or shape["scaled"] or shape["D"] != 64:
        return None
    return shape["B"], shape["N"], shape["H"]


BENCH = Bench(
    op="packed_attention",
    tests=("tests/kernels/test_packed_attention.py", "tests/kernels/test_short_attention.py"),
    cases=(
        *(case(b, 197, 12) for b in (1, 2, 4, 8, 256)), case(64, 197, 12, compiled=True),
        *(case(b, 197, h) for h in (6, 24) for b in (1, 8, 64, 256)), *(case(b, 577, 12) for b in (1, 8, 64)),
        *(case(b, n, h) for n in (201, 257, 261) for b, h in ((1, 6), (8, 6), (64, 6), (64, 12))),
        *(case(b, n, 12, scaled=1) for n in (197, 257) for b in (1, 8, 64)),
        case(1, 197, 12, queries=1), case(64, 197, 12, queries=1), segments(16, 12), segments(64, 12),
    ),
    checks=(
        case(2, 17, 2, 16), case(3, 1, 2, 64),
        case(2, 261, 4, 64), case(1, 288, 2, 64, queries=3),
        case(2, 197, 3, 72, queries=1), case(1, 577, 2, 80), case(2, 50, 3, 128),
        case(2, 197, 6, scaled=1), case(2, 50, 3, 64, scaled=1, queries=3), segments(4, 3),
        case(2, 197, 3, mode="backward"),
    ),
    inputs=inputs, providers={"eager": eager, "triton": triton, "short": short}, gradients=("qkv",),
    choice=choice,
    answers={"eager": "sdpa", "triton": "triton", "short": "short"}, takes={"short": few_keys},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(BENCH))
