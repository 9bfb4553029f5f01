"""A patch embedding as patches and one matrix product, against the convolution, its flattening and transposition.

Always timed whole: the rows of `patchify` are half of the traffic and of use only to the product.

    python benchmarks/bench_patchify.py [--smoke]
"""

import sys

import torch.nn.functional as F
from _runner import Bench, Case, Inputs, Maker, main
from torch import Tensor

from vtk_kernels.patchify import patchify


def case(
    b: int, c: int, px: int, py: int, size: tuple[int, int] = (224, 224), chans: int = 3, **kwargs: object
) -> Case:
    height, width = size
    tokens, row = b * (height // py) * (width // px), chans * px * py
    shape = {"B": b, "C": c, "pw": px, "ph": py, "H": height, "W": width, "chans": chans}
    # images and weight in, tokens out; the rows between are the implementation's own
    moved = b * chans * height * width + c * row + tokens * c
    return Case(shape, 2 * moved, 2 * tokens * row * c, **kwargs)  # type: ignore[arg-type]


def inputs(case: Case, make: Maker) -> Inputs:
    b, c, px, py, height, width, chans = case.shape.values()
    return {"images": make(b, chans, height, width), "w": make(c, chans, py, px, scale=(chans * px * py) ** -0.5)}


def eager(t: Inputs, case: Case) -> Tensor:
    patch = tuple(t["w"].shape[2:])
    return F.conv2d(t["images"], t["w"], stride=patch).flatten(2).transpose(1, 2)


def vtk(t: Inputs, case: Case) -> Tensor:
    py, px = t["w"].shape[2:]
    return F.linear(patchify(t["images"], (py, px)), t["w"].flatten(1))


BENCH = Bench(
    op="patchify",
    tests=("tests/kernels/test_patchify.py",),
    cases=tuple(case(b, c, 16, 16, compiled=(b, c) == (64, 384)) for c in (384, 768) for b in (1, 8, 64, 256)),
    checks=(
        case(2, 64, 4, 4, (16, 24)), case(2, 96, 14, 14, (28, 42)), case(1, 40, 5, 7, (21, 300), chans=1),
        case(3, 72, 32, 8, (32, 64), chans=4),
    ),
    inputs=inputs, providers={"eager": eager, "vtk": vtk},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(BENCH))
