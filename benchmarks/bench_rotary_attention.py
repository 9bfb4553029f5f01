"""Attention whose queries and keys are rotated on their way in: DINOv3 at 256 px, EVA-02 at 224 px, Sapiens2, BEiT.

Against torch's own rotation in front of SDPA; the choice table gets "triton" (one kernel) or "sdpa" (behind a kernel
that prepares heads) for each shape of whole batches with a rotary table and no norm or bias.

    python benchmarks/bench_rotary_attention.py [--smoke]
"""

import itertools
import sys

import torch
import torch.nn.functional as F
from _runner import Bench, Case, Inputs, Maker, main
from torch import Tensor

from vtk_kernels._heads import HeadNorms, Heads
from vtk_kernels._rotary_operator import behind
from vtk_kernels.packed_attention import packed_attention

LENGTHS = (53, 201, 581, 201)
"""Lengths of segments, repeated: images of 112, 224 and 384 pixels and five tokens more."""

ROWS = max(LENGTHS)


def case(
    b: int, n: int, h: int, d: int = 64, *, kv: int = 0, half: int = 1, norm: int = 0, biased: int = 0, rope: int = 1,
    scaled: int = 0, **kwargs: object,
) -> Case:  # fmt: skip
    passes, keys = 1 if kwargs.get("mode") != "backward" else 2, kv or h
    moved = passes * 2 * b * n * d * (2 * h + 2 * keys) + 4 * n * d * rope + 2 * h * n * n * biased + 4 * b * n * scaled
    shape = {
        "B": b, "N": n, "H": h, "D": d, "Hkv": kv, "rope": rope, "half": half, "norm": norm, "bias": biased,
        "scaled": scaled,
    }  # fmt: skip
    return Case(shape, moved, passes * 4 * b * h * n * n * d, **kwargs)  # type: ignore[arg-type]


def segments(count: int, h: int, d: int = 64, **kwargs: object) -> Case:
    lengths = segment_lengths(count)
    shape = {"segments": count, "T": sum(lengths), "H": h, "D": d, "rope": 1, "half": 1}
    moved = 8 * sum(lengths) * h * d + 4 * ROWS * d
    return Case(shape, moved, 4 * h * d * sum(n * n for n in lengths), **kwargs)  # type: ignore[arg-type]


def segment_lengths(count: int) -> list[int]:
    return list(itertools.islice(itertools.cycle(LENGTHS), count))


def inputs(case: Case, make: Maker) -> Inputs:
    shape, wide = case.shape, torch.promote_types(make.dtype, torch.float32)
    h, d, kv = shape["H"], shape["D"], shape.get("Hkv", 0) or shape["H"]
    rows = shape.get("N", ROWS)
    angles = make(rows, d // 2, dtype=wide)
    found = {"rope": torch.cat([angles.cos(), angles.sin()], 1)} if shape["rope"] else {}
    if "segments" in shape:
        lengths = segment_lengths(shape["segments"])
        return found | {"qkv": make(sum(lengths), 3 * h * d), "cu_seqlens": make.offsets(lengths)}
    found |= {"qkv": make(shape["B"], rows, (h + 2 * kv) * d)}
    if shape["norm"]:
        found |= {"q_weight": 1 + 0.2 * make(h, d), "k_weight": 1 + 0.2 * make(kv, d)}
    if shape["bias"]:
        found |= {"attn_bias": make(h, rows, rows)}
    if shape["scaled"]:
        found |= {"row_scale": 1 + 0.2 * make(shape["B"], rows, dtype=wide), "bias": make((h + 2 * kv) * d, scale=0.5)}
    return found


def heads(t: Inputs, case: Case) -> Heads:
    """The operands that belong to heads."""
    norm = HeadNorms("rms", 1e-6, t["q_weight"], k_weight=t["k_weight"]) if "q_weight" in t else None
    kv = case.shape.get("Hkv", 0) or case.shape["H"]
    return Heads(
        case.shape["H"], kv, t.get("rope"), bool(case.shape["half"]), None, norm, t.get("attn_bias")
    )  # fmt: skip


def rotated(x: Tensor, rope: Tensor, half: bool) -> Tensor:
    """x (B, N, H, D) as timm turns it: in the table's type, rounded once."""
    cos, sin = (t.repeat(1, 1, 2) if half else t.repeat_interleave(2, 2) for t in rope[: x.shape[1], None].chunk(2, -1))
    if half:
        a, b = x.chunk(2, -1)
        other = torch.cat([-b, a], -1)
    else:
        other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return (x * cos + other * sin).to(x.dtype)


def attend(t: Inputs, case: Case, qkv: Tensor) -> Tensor:
    """SDPA on (B, N, (H + 2·Hkv)·D) behind torch's norms and rotation."""
    own = heads(t, case)
    d = case.shape["D"]
    q, k, v = qkv.unflatten(-1, (-1, d)).split([own.num_heads, own.num_kv_heads, own.num_kv_heads], 2)
    if own.qk_norm is not None:
        q, k = (F.rms_norm(x, (d,), None, 1e-6) * w for x, w in ((q, t["q_weight"]), (k, t["k_weight"])))
    if own.rope is not None:
        q, k = (rotated(x, own.rope, own.rotate_half) for x in (q, k))
    if own.num_kv_heads < own.num_heads:
        k, v = (x.repeat_interleave(own.num_heads // own.num_kv_heads, 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, own.attn_bias, scale=d**-0.5).transpose(1, 2).flatten(2)


def eager(t: Inputs, case: Case) -> Tensor:
    qkv = t["qkv"]
    if "segments" in case.shape:
        return torch.cat(
            [attend(t, case, part[None])[0] for part in qkv.split(segment_lengths(case.shape["segments"]))]
        )
    if case.shape["scaled"]:  # the norm's scale and the bias behind a product of raw tokens
        qkv = qkv * t["row_scale"].to(qkv.dtype)[..., None] + t["bias"]
    return attend(t, case, qkv)


def triton(t: Inputs, case: Case) -> Tensor:
    """The kernel, whatever the choice table says; on a CPU and for gradients what the operation does by itself."""
    use_triton = True if t["qkv"].is_cuda and case.mode == "forward" else None
    longest = max(segment_lengths(case.shape["segments"])) if "segments" in case.shape else None
    own = heads(t, case)
    return packed_attention(
        t["qkv"], own.num_heads, t.get("cu_seqlens"), None, case.shape["D"] ** -0.5, t.get("row_scale"), t.get("bias"),
        longest, num_kv_heads=own.num_kv_heads, rope=own.rope, rotate_half=own.rotate_half, qk_norm=own.qk_norm,
        attn_bias=own.attn_bias, use_triton=use_triton,
    )  # fmt: skip


def prepared(t: Inputs, case: Case) -> Tensor:
    """SDPA behind the kernel that prepares heads; on a CPU what the operation does by itself."""
    if not t["qkv"].is_cuda:
        return triton(t, case)
    return behind(t["qkv"], heads(t, case), None, case.shape["D"] ** -0.5, t.get("row_scale"), t.get("bias"))


def whole_batches(case: Case) -> bool:
    return "segments" not in case.shape and case.mode == "forward"


def choice(case: Case) -> tuple[int, int, int] | None:
    """What the choice table is about: whole images with a table, all tokens queries, 64 channels a head."""
    shape = case.shape
    beside = ("Hkv", "norm", "bias", "scaled")
    if "segments" in shape or shape["D"] != 64 or not shape["rope"] or any(shape[name] for name in beside):
        return None
    return shape["B"], shape["N"], shape["H"]


BENCH = Bench(
    op="rotary_attention",
    tests=("tests/kernels/test_rotary_attention.py",),
    cases=(
        *(case(b, 261, h) for h in (6, 12) for b in (1, 8, 64)), case(256, 261, 6),  # DINOv3 S/16 and B/16
        *(case(b, 257, 12, half=0) for b in (1, 8, 64)),  # EVA-02 B/14
        *(case(b, 261, 12, scaled=1) for b in (1, 8, 64)), case(8, 261, 12, norm=1), case(8, 257, 16, 88, half=0),
        case(1, 3077, 16, kv=8), case(8, 197, 12, biased=1, rope=0, norm=0), segments(16, 12), segments(64, 12),
    ),
    checks=(
        case(2, 17, 2, 16), case(2, 17, 2, 16, half=0), case(1, 70, 4, 64, kv=2, norm=1, scaled=1),
        case(2, 50, 3, 72, half=0, scaled=1), case(2, 197, 3, 64, biased=1, rope=0),
        case(2, 33, 2, 128, biased=1, norm=1), segments(4, 3), case(2, 65, 2, mode="backward"),
        case(2, 40, 2, half=0, mode="backward"),
    ),
    inputs=inputs, providers={"eager": eager, "triton": triton, "prepared": prepared}, gradients=("qkv",),
    choice=choice, answers={"triton": "triton", "prepared": "sdpa"}, takes={"prepared": whole_batches},
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(BENCH))
