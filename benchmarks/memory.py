"""The memory modes of attention-only training on a CPU: what each keeps for backward, and the time of its steps.

    python benchmarks/memory.py

Kept bytes are counted, not sampled: of a model of one and of two blocks on one and on two images, so that all that is
not a block's own cancels; in units of C bf16 elements per token and block. Steps (forward, backward, AdamW) run in
turns, round by round, against full fine-tuning; the ratio is the median over rounds. Written to
``results/memory.csv``.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import _rows
import timm
import torch
import torch.nn.functional as F
from torch import nn

from vtk import console
from vtk.training.engine.precision import Bf16
from vtk.training.finetune_config import MODES
from vtk.training.frozen_ffn import apply_memory_mode
from vtk.training.frozen_ffn.estimate import kept_bytes, tensors_of
from vtk.training.policies import policy

BOUNDS = {"plain": 11.3, "act8": 8.3, "recompute": 6.3, "minimal": 3.3}
MODELS = {"vit_base_patch16_224": "vit_base", "vit_base_patch16_dinov3": "vit_base_dinov3"}
STEP_BOUNDS = {
    "vit_base_patch16_224": {"plain": 0.80, "recompute": 0.97, "minimal": 1.05},
    "vit_base_patch16_dinov3": {"plain": 0.82},
}
WIDTH = 768
REGIMES = ("bf16 regime", "bf16 regime, compiled", "autocast")
SIDES = ("full", "attn by torch", *MODES)


def build(side: str, depth: int, size: int, name: str = "vit_base_patch16_224") -> nn.Module:
    """Return a ViT-B of ``depth`` blocks that trains all weights, or attention by torch's autograd or by a mode."""
    torch.manual_seed(0)
    model = timm.create_model(name, depth=depth, img_size=size, num_classes=10)
    policy.apply(model, policy.select(model, "full" if side == "full" else "attn"))
    policy.train_mode(model)
    if side in MODES:
        apply_memory_mode(model, side)  # type: ignore[arg-type]
    return model


def kept(side: str, regime: str, depth: int, size: int, batch: int) -> int:
    """Return the bytes that a forward pass and its loss keep."""
    model = build(side, depth, size)
    if regime != "autocast":
        Bf16().prepare(model, [n for n, p in model.named_parameters() if p.requires_grad])
    if regime == "bf16 regime, compiled":
        torch._dynamo.reset()
        for block in model.blocks:
            block.compile(fullgraph=True)
    images, labels = torch.randn(batch, 3, size, size), torch.arange(batch) % 10

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=regime == "autocast"):
            return F.cross_entropy(model(images).float(), labels)

    return kept_bytes(run, tensors_of(model))


def units(side: str, regime: str, size: int) -> float:
    """Return what one block keeps per token, in units of C bf16 elements."""
    found = {(d, b): kept(side, regime, d, size, b) for d in (1, 2) for b in (1, 2)}
    tokens = (size // 16) ** 2 + 1
    return (found[2, 2] - found[2, 1] - found[1, 2] + found[1, 1]) / (tokens * WIDTH * 2)


def count(size: int, regimes: tuple[str, ...]) -> list[dict[str, object]]:
    """Return a row per regime and side."""
    rows = []
    for regime in regimes:
        full = units("full", regime, size)
        for side in SIDES:
            value = full if side == "full" else units(side, regime, size)
            bound = f"<= {BOUNDS[side]}" if side in BOUNDS else ""
            rows.append(row("kept for backward", f"ViT-B/16 {size} px, {regime}", side, value, "units", value / full,
                            bound, 1))  # fmt: skip
            gc.collect()
    return rows


def row(
    what: str, case: str, side: str, value: float, unit: str, ratio: float, bound: str, rounds: int
) -> dict[str, object]:
    """Return one row; ``ratio`` is against full fine-tuning."""
    return {"measured": what, "case": case, "mode": side, "value": round(value, 3), "unit": unit,
            "ratio": round(ratio, 3), "bound": bound, "rounds": rounds}  # fmt: skip


def make_step(name: str, side: str, depth: int, size: int, batch: int) -> Callable[[], None]:
    """Return what does one training step in fp32."""
    model = build(side, depth, size, name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    images, labels = torch.randn(batch, 3, size, size), torch.arange(batch) % 10

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def time_steps(name: str, rounds: int, depth: int, size: int, batch: int) -> list[dict[str, object]]:
    """Time the steps of all sides in turns; two rounds before warm up."""
    steps = {side: make_step(name, side, depth, size, batch) for side in SIDES}
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for i in range(rounds + 2):
        for side, step in steps.items():
            begin = time.perf_counter()
            step()
            if i >= 2:
                found[side].append(1e3 * (time.perf_counter() - begin))
    case = f"{MODELS[name]} depth {depth}, {size} px, batch {batch}, fp32"
    rows = []
    for side, times in found.items():
        ratio = statistics.median(a / b for a, b in zip(times, found["full"], strict=True))
        bounds = STEP_BOUNDS[name]
        bound = f"<= {bounds[side]:.2f}" if side in bounds else ""
        rows.append(row("time of a step", case, side, statistics.median(times), "ms", ratio, bound, rounds))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("count", "time"), help="one of the two parts")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="of the time")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES), help="of the count")
    parser.add_argument("--count-size", type=int, default=384, help="pixels, of the count")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--depth", type=int, default=3, help="of the timed model")
    parser.add_argument("--size", type=int, default=224, help="pixels, of the timed model")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--results", type=Path, default=_rows.RESULTS / "memory.csv")
    parser.add_argument("--skip-tests", action="store_true", help="only for trying out this script")
    args = parser.parse_args()
    if not args.skip_tests:
        _rows.require_green(["tests/vtk/training/test_memory_gradients.py", "tests/vtk/training/test_memory_kept.py"])
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = [] if args.only == "time" else count(args.count_size, tuple(args.regimes))
    for name in [] if args.only == "count" else args.models:
        rows += time_steps(name, args.rounds, args.depth, args.size, args.batch_size)
    for found in rows:
        _rows.append(args.results, {**found, **_rows.context()})
    shown = [tuple(r[k] for k in ("measured", "case", "mode", "value", "unit", "ratio", "bound")) for r in rows]
    console.table("Memory modes", ("measured", "case", "mode", "value", "unit", "of full", "bound"), shown,
                  left=(0, 1, 2, 4))  # fmt: skip


if __name__ == "__main__":
    main()
