"""Cost of a stem on a CPU: forward passes of ViT-B/16 with it and with the model's own stem, interleaved.

    python benchmarks/stems.py

Both sides run in every round, in changing order, so that a change of the machine's speed meets both.
The ratio is the median over rounds; its spread is the quartiles. ``--clock thread`` counts the time of this one thread
and not what other programs took from it. Written to ``results/stems.csv``.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _rows
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "thread": time.thread_time}
BOUNDS = {"hmlp": "<= 1.03", "hmlp-ln": "<= 1.03"}


def build(stem: str | None, kind: str, smoke: bool) -> Any:
    """Return ViT-B/16 with a stem, as timm runs it or fused."""
    from vtk.fused import fuse
    from vtk.models.stems import replace_stem

    small = {"depth": 1, "embed_dim": 32, "num_heads": 2, "img_size": 32} if smoke else {}
    model = timm.create_model("vit_base_patch16_224", **small).eval()
    if stem is not None:
        replace_stem(model, stem=stem)  # type: ignore[arg-type]
    return fuse(model) if kind == "fused" else model


def work(stem: str | None, smoke: bool) -> int:
    """Return multiply-adds of one image; on no device, since torch does not count every operation of a CPU."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = build(stem, "eager", smoke)
        model(torch.zeros(1, 3, *model.patch_embed.img_size))
    return counter.get_total_flops() // 2


def ratios(plain: Any, stem: Any, batch: int, side: int, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Return medians in milliseconds, and median and quartiles of the ratio of a round."""
    images = torch.randn(batch, 3, side, side)
    times: list[list[float]] = [[], []]
    with torch.inference_mode():
        for i in range(rounds + 2):
            for which in (0, 1) if i % 2 else (1, 0):
                start = clock()
                (plain, stem)[which](images)
                if i > 1:
                    times[which].append(1e3 * (clock() - start))
    found = sorted(b / a for a, b in zip(*times, strict=True))
    low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
    medians = [round(statistics.median(side), 2) for side in times]
    return {"plain_ms": medians[0], "stem_ms": medians[1], "ratio": round(middle, 4), "ratio_p25": round(low, 4),
            "ratio_p75": round(high, 4)}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    from vtk.models.stems import STEMS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stems", nargs="+", default=["hmlp", "hmlp-ln", "conv", "levit"], choices=STEMS)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--kinds", nargs="+", default=["eager", "fused"], choices=["eager", "fused"])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="thread: for one thread on a busy machine")
    parser.add_argument("--results", type=Path, default=_rows.RESULTS / "stems.csv")
    parser.add_argument("--dry-run", action="store_true", help="print, and write nothing")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, three rounds; writes nothing")
    args = parser.parse_args(argv)
    if args.clock == "thread" and args.threads != 1:
        parser.error("`--clock thread` sees one thread only; leave --threads at 1")
    if not (args.smoke or args.dry_run):
        if args.rounds < 7:
            parser.error(f"`--rounds` is {args.rounds}; quartiles need at least 7")
        _rows.require_green(["tests/vtk/models/test_stems.py", "tests/vtk/models/test_stems_fused.py"])
    torch.set_num_threads(args.threads)
    side, rounds = (32, 3) if args.smoke else (224, args.rounds)
    for kind in args.kinds:
        plain = build(None, kind, args.smoke)
        for name in args.stems:
            model = build(name, kind, args.smoke)
            more = work(name, args.smoke) / work(None, args.smoke)
            for batch in args.batch_sizes:
                found = ratios(plain, model, batch, side, rounds, CLOCKS[args.clock])
                row = {
                    "stem": name, "kind": kind, "batch": batch, **found, "work_ratio": round(more, 4),
                    "bound": BOUNDS.get(name, ""), "clock": args.clock, "rounds": rounds,
                }  # fmt: skip
                print("  ".join(str(v) for v in row.values()), flush=True)
                if not (args.smoke or args.dry_run):
                    _rows.append(args.results, {**row, **_rows.context()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
