"""One linear layer whose weights depend on the row's task: a packed batch of many tasks.

Against a loop of linears (which needs the offsets on the host) and against `F.grouped_mm`, which has no bias.

    python benchmarks/bench_grouped_linear.py [--smoke]
"""

import sys

import torch
import torch.nn.functional as F
from _runner import Bench, Case, Inputs, Maker, main
from torch import Tensor

from vtk_kernels.grouped_linear import grouped_linear, make_tile_map

BLOCK = 64
"""Rows a tile; a task's last tile may be shorter."""


def case(groups: int, rows: int, k: int, f: int, *, scaled: int = 0, mode: str = "forward", **kwargs: object) -> Case:
    t = sum(row_counts(groups, rows))
    passes = 1 if mode == "forward" else 2
    size = passes * 2 * (t * k + groups * (k * f + f) + t * f) + 4 * t * scaled
    shape = {"groups": groups, "rows": rows, "K": k, "F": f, "scaled": scaled}
    return Case(shape, size, passes * 2 * t * k * f, mode=mode, **kwargs)  # type: ignore[arg-type]


def row_counts(groups: int, rows: int) -> list[int]:
    """Tasks of ``rows`` rows, every fourth of twice as many; the second, where there are three or more, has none."""
    counts = [rows * (2 if i % 4 == 3 else 1) for i in range(groups)]
    return [0 if i == 1 and groups > 2 else n for i, n in enumerate(counts)]


def inputs(case: Case, make: Maker) -> Inputs:
    groups, rows, k, f, scaled = case.shape.values()
    counts = row_counts(groups, rows)
    offsets = make.offsets(counts)
    found = {
        "x": make(sum(counts), k), "w": make(groups, f, k, scale=k**-0.5), "b": make(groups, f, scale=0.5),
        "offsets": offsets, "tile_map": make_tile_map(offsets, BLOCK, sum(counts) // BLOCK + groups),
    }  # fmt: skip
    return found | ({"row_scale": 1 + 0.2 * make(sum(counts), dtype=torch.float32)} if scaled else {})


def eager(t: Inputs, case: Case) -> Tensor:
    counts = row_counts(case.shape["groups"], case.shape["rows"])
    parts = t["x"].split(counts)
    if not case.shape["scaled"]:
        return torch.cat([F.linear(x, w, b) for x, w, b in zip(parts, t["w"], t["b"], strict=True)])
    scales = t["row_scale"].to(t["x"].dtype)[:, None].split(counts)
    products = zip(parts, t["w"], scales, t["b"], strict=True)
    return torch.cat([F.linear(x, w) * scale + b for x, w, scale, b in products])


def grouped_mm(t: Inputs, case: Case) -> Tensor:
    y = F.grouped_mm(t["x"], t["w"].transpose(-2, -1), offs=t["offsets"][1:])
    return y + t["b"].repeat_interleave(t["offsets"].diff(), 0, output_size=len(y))


def vtk(t: Inputs, case: Case) -> Tensor:
    return grouped_linear(t["x"], t["w"], t["b"], t["tile_map"], t.get("row_scale"))


BENCH = Bench(
    op="grouped_linear",
    tests=("tests/kernels/test_grouped_linear.py",),
    cases=(
        case(16, 197, 768, 2304), case(64, 197, 768, 2304), case(64, 197, 768, 768), case(8, 1576, 768, 2304),
        case(16, 197, 384, 1152), case(16, 197, 768, 2304, mode="backward"),
    ),
    checks=(
        case(3, 17, 64, 128), case(4, 37, 100, 72), case(2, 197, 192, 576, scaled=1),
        case(3, 17, 64, 128, mode="backward"),
    ),
    inputs=inputs, providers={"eager": eager, "grouped_mm": grouped_mm, "vtk": vtk}, gradients=("x", "w", "b"),
    choice=lambda c: (
        (sum(row_counts(c.shape["groups"], c.shape["rows"])), c.shape["F"], c.shape["K"])
        if c.mode == "forward" and not c.shape["scaled"] else None
    ),
    answers={"grouped_mm": "grouped_mm", "vtk": "triton"},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(BENCH))
