"""Cost of a product of the Hessian with a vector, against one gradient of the same loss.

    python benchmarks/hvp.py

All of them take turns, round by round, so that a change of the machine's speed meets them all; the ratio is the median
over rounds of ratios within a round. A *fresh* product computes everything; a *kept* one has the graph of the gradient
from the product before, which is what eigenvalues are computed by as long as there is room. The gradient has the
attention that the model has, fused where torch has it. Rows go to ``results/hvp.csv``.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import _rows
import timm
import torch

from vtk import console
from vtk.analysis.probes.losses import CrossEntropy
from vtk.analysis.probes.second_order import hessian_product

BOUND = 3.5


def measure(name: str, size: int, batch: int, rounds: int, device: torch.device) -> list[dict[str, object]]:
    """Return a row for a fresh product and one for a kept one."""
    torch.manual_seed(0)
    sized = {} if "resnet" in name else {"img_size": size}
    model = timm.create_model(name, num_classes=10, **sized).to(device).eval()
    data = torch.randn(batch, 3, size, size, device=device), torch.arange(batch, device=device) % 10
    parameters = list(model.parameters())
    vector = torch.randn(sum(p.numel() for p in parameters), device=device)
    loss = CrossEntropy()

    def gradient() -> None:
        torch.autograd.grad(loss(model, *data), parameters)

    times: dict[str, list[float]] = {"gradient": [], "fresh": [], "kept": []}
    for i in range(rounds + 1):  # the first round warms up
        found = {"gradient": _seconds(gradient, device)}
        for kind, keep in (("fresh", 0), ("kept", 2**40)):
            # opened anew in each round: inside of the context no attention is fused, and the gradient's may be
            with hessian_product(model, loss, [data], keep=keep) as product:
                product(vector)
                found[kind] = _seconds(functools.partial(product, vector), device)
        if i:
            for kind, seconds in found.items():
                times[kind].append(1000 * seconds)
    return [
        {
            "comparison": f"{kind} product / gradient, time",
            "case": f"{name} {size} px, batch {batch}",
            "first": round(statistics.median(times[kind]), 1),
            "second": round(statistics.median(times["gradient"]), 1), "unit": "ms",
            "ratio": round(statistics.median(a / b for a, b in zip(times[kind], times["gradient"], strict=True)), 3),
            "bound": f"<= {BOUND}", "rounds": rounds,
        }
        for kind in ("fresh", "kept")
    ]  # fmt: skip


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["vit_tiny_patch16_224"])
    parser.add_argument("--img-size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=_rows.RESULTS / "hvp.csv")
    parser.add_argument("--skip-tests", action="store_true", help="only for trying out this script")
    args = parser.parse_args()
    if not args.skip_tests:
        _rows.require_green(["tests/vtk/analysis/measures/test_hessian.py"])
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    rows = [row for name in args.models for row in measure(name, args.img_size, args.batch_size, args.rounds, device)]
    for row in rows:
        _rows.append(args.results, {**row, **_rows.context(args.device)})
    shown = [(r["comparison"], r["case"], r["first"], r["second"], r["unit"], r["ratio"], r["bound"]) for r in rows]
    console.table("Products of the Hessian", ("comparison", "case", "first", "second", "unit", "ratio", "bound"), shown,
                  left=(0, 1, 4))  # fmt: skip


if __name__ == "__main__":
    main()
