"""Speed of the training engine on a CPU: against a bare PyTorch loop, and attention only against full fine-tuning.

    python benchmarks/engine.py

Both sides of a comparison run in turns, round by round, so that a change of the machine's speed meets both. Medians
over rounds are written to ``results/engine.csv``.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import _rows
import _stream
import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image

from vtk import console
from vtk.card import InputSpec
from vtk.data.audit.result import Sample
from vtk.data.loading.train_pipeline import train_transform
from vtk.training.engine.fitting import Loop
from vtk.training.engine.precision import Fp32
from vtk.training.engine.processes import Ranks
from vtk.training.engine.step_rule import PlainStep
from vtk.training.engine.streams import ImageStream
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.objectives.base import Batch, Classification
from vtk.training.policies import policy

RANKS = Ranks(torch.device("cpu"))


def make_loop(model: torch.nn.Module, stream: object, config: FinetuneConfig) -> Loop:
    objective = Classification(10, smoothing=config.smoothing)
    return Loop(model, objective, [stream], config, Fp32(), PlainStep(), RANKS)


def bare_epoch(model: torch.nn.Module, config: FinetuneConfig, steps: int) -> Callable[[Iterator[Batch]], float]:
    """Return what trains for one epoch with nothing but PyTorch and returns the seconds it took."""
    trained = [p for p in model.parameters() if p.requires_grad]
    heads = {id(p) for p in model.head.parameters()}
    groups = [
        {"params": [p for p in trained if (id(p) in heads) == head and (p.ndim > 1) == matrix],
         "lr": config.lr * (config.head_lr_mult if head else 1), "weight_decay": config.weight_decay * matrix}
        for head in (False, True) for matrix in (False, True)
    ]  # fmt: skip
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]])
    total = steps * config.epochs
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / total)))

    def run(batches: Iterator[Batch]) -> float:
        model.train()
        begin = time.perf_counter()
        for batch in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch.images), batch.labels, label_smoothing=config.smoothing)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, config.clip_grad)
            optimizer.step()
            schedule.step()
        return time.perf_counter() - begin

    return run


def images(folder: Path, count: int, side: int) -> list[Sample]:
    """Write random JPEG files."""
    rng = np.random.default_rng(0)
    samples = []
    for i in range(count):
        path = folder / f"{i}.jpg"
        Image.fromarray(rng.integers(0, 255, (side, side, 3), dtype=np.uint8)).save(path)
        samples.append(Sample(path, i % 10))
    return samples


def against_bare_loop(rounds: int, steps: int, size: int, batch: int, workers: int) -> dict[str, object]:
    """Images per second of the engine and of a bare loop over the same loader."""
    config = FinetuneConfig(epochs=rounds + 1)
    with tempfile.TemporaryDirectory() as folder:
        samples = images(Path(folder), steps * batch, size)
        transform = train_transform(InputSpec(size, size))
        sides = []
        for _ in range(2):
            model = timm.create_model("vit_tiny_patch16_224", img_size=size, num_classes=10)
            policy.apply(model, policy.select(model, "attn"))
            stream = ImageStream(samples, transform, batch_size=batch, seed=0, workers=workers, ranks=RANKS)
            sides.append((model, stream))
        loop = make_loop(*sides[0], config)
        bare = bare_epoch(sides[1][0], config, steps)
        ours, theirs = [], []
        for i in range(rounds + 1):  # the first round warms up: worker processes, optimiser state
            seconds = loop.run_epoch(False)["seconds"], bare(sides[1][1].epoch(i))
            if i:
                ours.append(seconds[0])
                theirs.append(seconds[1])
    count = steps * batch
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    return {
        "comparison": "engine / bare loop, images per second",
        "case": f"vit_tiny_patch16_224 {size} px, batch {batch}, {workers} workers, attn",
        "first": round(count / statistics.median(ours), 2), "second": round(count / statistics.median(theirs), 2),
        "unit": "images/s", "ratio": round(ratio, 3), "bound": ">= 0.90", "rounds": rounds,
    }  # fmt: skip


def attn_against_full(rounds: int, depth: int, size: int, batch: int) -> dict[str, object]:
    """Step time of attention-only and of full fine-tuning."""
    data = Batch(torch.randn(batch, 3, size, size), torch.arange(batch) % 10)
    loops = {}
    for name in ("attn", "full"):
        model = timm.create_model("vit_base_patch16_224", depth=depth, img_size=size, num_classes=10)
        policy.apply(model, policy.select(model, name))
        loops[name] = make_loop(model, _stream.Same(data, 2), FinetuneConfig(epochs=rounds + 1))
    times: dict[str, list[float]] = {"attn": [], "full": []}
    for i in range(rounds + 1):
        for name, loop in loops.items():
            seconds = loop.run_epoch(False)["seconds"] / 2
            if i:
                times[name].append(1000 * seconds)
    ratio = statistics.median(a / b for a, b in zip(times["attn"], times["full"], strict=True))
    return {
        "comparison": "attn / full, time of a step",
        "case": f"vit_base_patch16_224 depth {depth}, {size} px, batch {batch}",
        "first": round(statistics.median(times["attn"]), 1), "second": round(statistics.median(times["full"]), 1),
        "unit": "ms", "ratio": round(ratio, 3), "bound": "<= 0.82", "rounds": rounds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12, help="of a round, against the bare loop")
    parser.add_argument("--img-size", type=int, default=96, help="against the bare loop")
    parser.add_argument("--batch-size", type=int, default=32, help="against the bare loop")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--depth", type=int, default=3, help="of vit_base")
    parser.add_argument("--big-size", type=int, default=224, help="of vit_base")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--results", type=Path, default=_rows.RESULTS / "engine.csv")
    parser.add_argument("--skip-tests", action="store_true", help="only for trying out this script")
    args = parser.parse_args()
    if not args.skip_tests:
        _rows.require_green(["tests/vtk/training/engine/test_fit.py", "tests/vtk/training/policies/test_policy.py"])
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = [
        against_bare_loop(args.rounds, args.steps, args.img_size, args.batch_size, args.workers),
        attn_against_full(args.rounds, args.depth, args.big_size, 4),
    ]
    for row in rows:
        _rows.append(args.results, {**row, **_rows.context()})
    shown = [(r["comparison"], r["case"], r["first"], r["second"], r["unit"], r["ratio"], r["bound"]) for r in rows]
    console.table("Training engine", ("comparison", "case", "first", "second", "unit", "ratio", "bound"), shown,
                  left=(0, 1, 4))  # fmt: skip


if __name__ == "__main__":
    main()
