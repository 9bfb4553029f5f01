"""Attention and its gradient as training calls them: apart, as the memory mode `minimal` does.

FlashAttention against cuDNN, forward and backward together on the strided queries, keys and values of one packed
matrix; the choice table gets the quicker for each shape.

    python benchmarks/bench_kept_attention.py [--smoke]
"""

import functools
import sys

import torch
import torch.nn.functional as F
from _runner import Bench, Case, Inputs, Maker, Outputs, main

from vtk.training.frozen_ffn.flash import Kernel, attention, attention_backward


def case(b: int, n: int, h: int, d: int = 64, **kwargs: object) -> Case:
    # read: q, k, v and the gradient of the output; written: the output and three gradients
    return Case({"B": b, "N": n, "H": h, "D": d}, 16 * b * n * h * d, 12 * b * h * n * n * d, **kwargs)  # type: ignore[arg-type]


def inputs(case: Case, make: Maker) -> Inputs:
    b, n, h, d = case.shape.values()
    return {"qkv": make(b, n, 3, h, d), "g": make(b, n, h, d)}


def eager(t: Inputs, case: Case) -> Outputs:
    """SDPA by torch's autograd, whichever kernel it takes."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in t["qkv"].permute(2, 0, 3, 1, 4).unbind(0))
        o = F.scaled_dot_product_attention(q, k, v)
        found = torch.autograd.grad(o, (q, k, v), t["g"].transpose(1, 2))
    return o.detach().transpose(1, 2), *found


def apart(t: Inputs, case: Case, kernel: Kernel) -> Outputs:
    """Attention, then its gradient from what is kept; on a CPU the kernel that is there."""
    q, k, v = t["qkv"].permute(2, 0, 3, 1, 4).unbind(0)
    half = t["qkv"].dtype in (torch.float16, torch.bfloat16)
    taken = kernel if q.is_cuda and half else "math" if q.is_cuda else "cpu"
    o, lse = attention(q, k, v, taken)
    return o, *attention_backward(t["g"], q, k, v, o, lse, taken)


def choice(case: Case) -> tuple[int, int, int] | None:
    """What the choice table is about: 64 channels a head."""
    b, n, h, d = case.shape.values()
    return (b, n, h) if d == 64 else None


BENCH = Bench(
    op="kept_attention",
    tests=("tests/vtk/training/test_memory_blocks.py",),
    cases=(*(case(b, 577, 12) for b in (8, 32)), *(case(b, 197, 12) for b in (32, 128)), case(128, 197, 6)),
    checks=(case(2, 17, 2), case(2, 50, 3), case(1, 577, 2)),
    inputs=inputs,
    providers={
        "eager": eager,
        "flash": functools.partial(apart, kernel="flash"),
        "cudnn": functools.partial(apart, kernel="cudnn"),
    },
    choice=choice,
    answers={"flash": "flash", "cudnn": "cudnn"},
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
