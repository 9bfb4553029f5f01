"""One linear layer of many tasks kept as factors: a product with the shared weights, and a thin change for each row.

Against a loop over tasks, which needs the offsets on the host; both include the shared product. What merged weights, a
whole matrix for each task, take instead is in `bench_grouped_linear.py`, at the same shapes. The choice table gets
"separate" (the library's product, and `grouped_low_rank`) or "epilogue" (`low_rank_linear`).

    python benchmarks/bench_grouped_low_rank.py [--smoke]
"""

import sys

import torch
import torch.nn.functional as F
from _runner import Bench, Case, Inputs, Maker, main
from bench_grouped_linear import BLOCK, row_counts
from torch import Tensor

from vtk_kernels.grouped_low_rank import UNIT, grouped_low_rank, make_tile_map
from vtk_kernels.low_rank_linear import low_rank_linear


def case(groups: int, rows: int, k: int, f: int, rank: int, *, mixed: int = 0, int8: int = 0, **kwargs: object) -> Case:
    counts, ranks = row_counts(groups, rows), ranks_of(groups, rank, mixed)
    t, n = sum(counts), sum(ranks)
    thin = sum(count * r for count, r in zip(counts, ranks, strict=True)) * (k + f)
    size = 2 * (t * k + f * k + t * f + groups * f) + (1 if int8 else 2) * n * (k + f)
    size += 4 * (n + k + f) * int8
    shape = {"groups": groups, "rows": rows, "K": k, "F": f, "rank": rank, "mixed": mixed, "int8": int8}
    return Case(shape, size, 2 * (t * k * f + thin), **kwargs)  # type: ignore[arg-type]


def ranks_of(groups: int, rank: int, mixed: int) -> list[int]:
    """All tasks of one rank; mixed: from 0 to twice the rank, in turn."""
    return [rank * (i % 5) // 2 if mixed else rank for i in range(groups)]


def inputs(case: Case, make: Maker) -> Inputs:
    groups, rows, k, f, rank, mixed, int8 = case.shape.values()
    counts, ranks = row_counts(groups, rows), ranks_of(groups, rank, mixed)
    bounds = torch.tensor([0, *ranks]).cumsum(0)
    offsets = make.offsets(counts)
    found = {
        "x": make(sum(counts), k), "w": make(f, k, scale=k**-0.5), "bias": make(groups, f, scale=0.5),
        "a": make(int(bounds[-1]), k, scale=k**-0.5), "b": make(int(bounds[-1]), f, scale=0.2),
        "spans": torch.stack([bounds[:-1], bounds.diff()], 1).to(make.device, torch.int32),
        "tile_map": make_tile_map(offsets, BLOCK, sum(counts) // BLOCK + groups),
    }  # fmt: skip
    if int8:
        for name in ("a", "b"):
            found[name] = (found[name] / found[name].abs().amax(1, keepdim=True) * (UNIT - 1)).round().to(torch.int8)
        found["scale"] = (0.05 * make(int(bounds[-1]), dtype=torch.float32)).abs()
        found |= {f"{n}_scale": 1 + 0.2 * make(size, dtype=torch.float32) for n, size in (("x", k), ("y", f))}
    return found


def factors(t: Inputs, group: int) -> tuple[Tensor, Tensor]:
    """Return what a and b of a group stand for, in the type of x."""
    first, rank = t["spans"][group].tolist()
    a, b = t["a"][first : first + rank], t["b"][first : first + rank]
    if a.dtype == torch.int8:
        a = a / UNIT * t["x_scale"] * t["scale"][first : first + rank, None]
        b = b / UNIT * t["y_scale"]
    return a.to(t["x"].dtype), b.to(t["x"].dtype)


def eager(t: Inputs, case: Case) -> Tensor:
    counts = row_counts(case.shape["groups"], case.shape["rows"])
    y = F.linear(t["x"], t["w"]).split(counts)
    parts = []
    for group, (x, shared) in enumerate(zip(t["x"].split(counts), y, strict=True)):
        a, b = factors(t, group)
        parts.append(shared + F.linear(x, a) @ b + t["bias"][group])
    return torch.cat(parts)


def factored(t: Inputs, case: Case) -> tuple[tuple[object, ...], dict[str, Tensor]]:
    """Return a, b and all that follows among the operands."""
    rank = max(ranks_of(case.shape["groups"], case.shape["rank"], case.shape["mixed"]))
    scales = {name: t[name] for name in ("scale", "x_scale", "y_scale") if name in t}
    return (t["a"], t["b"], t["spans"], t["tile_map"], rank, t["bias"]), scales


def separate(t: Inputs, case: Case) -> Tensor:
    y = F.linear(t["x"], t["w"])
    operands, scales = factored(t, case)
    grouped_low_rank(y, t["x"], *operands, **scales)  # type: ignore[arg-type]
    return y


def epilogue(t: Inputs, case: Case) -> Tensor:
    operands, scales = factored(t, case)
    return low_rank_linear(t["x"], t["w"], *operands, **scales)  # type: ignore[arg-type]


BENCH = Bench(
    op="grouped_low_rank",
    tests=("tests/kernels/test_grouped_low_rank.py",),
    cases=(
        case(16, 197, 384, 1152, 16), case(64, 197, 384, 1152, 16), case(64, 197, 384, 384, 16),
        case(16, 197, 768, 2304, 16), case(64, 197, 768, 2304, 16), case(64, 197, 768, 768, 16),
        case(64, 197, 768, 2304, 16, int8=1), case(64, 197, 768, 2304, 32, mixed=1), case(8, 1576, 768, 2304, 16),
    ),
    checks=(case(3, 17, 64, 128, 8), case(5, 37, 100, 72, 40, mixed=1), case(5, 37, 128, 72, 16, mixed=1, int8=1)),
    inputs=inputs, providers={"eager": eager, "separate": separate, "epilogue": epilogue},
    choice=lambda c: (
        (sum(row_counts(c.shape["groups"], c.shape["rows"])), c.shape["F"], c.shape["K"])
        if not c.shape["mixed"] and not c.shape["int8"] else None
    ),
    answers={"separate": "separate", "epilogue": "epilogue"},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(BENCH))
