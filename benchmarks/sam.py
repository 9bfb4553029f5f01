"""Cost of a step of sharpness-aware minimisation and of adversarial training, against a plain step of the same engine.

    python benchmarks/sam.py

All rules take turns, round by round, so that a change of the machine's speed meets them all; the ratio is the median
over rounds of ratios within a round. Rows go to ``results/sam.csv``.
"""

import argparse
import statistics
from pathlib import Path

import _rows
import _stream
import timm
import torch

from vtk import console
from vtk.card import InputSpec
from vtk.training.engine.fitting import Loop
from vtk.training.engine.precision import make_precision
from vtk.training.engine.processes import Ranks
from vtk.training.engine.step_rule import PlainStep, StepRule
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.objectives.base import Batch, Classification
from vtk.training.policies import policy
from vtk.training.policies.policy import PolicyName
from vtk.training.step_rules.adversarial import Adversary
from vtk.training.step_rules.sam import Ascent

BOUND = 2.1
STEPS = 2  # of a round


def make_rules(size: int, batch: int) -> dict[str, StepRule]:
    """Return the rules by name, the plain one first."""
    adversary = Adversary(2, [InputSpec(size, size)])
    return {
        "plain": PlainStep(), "sam": Ascent(0.1), "sam, adaptive": Ascent(1.0, adaptive=True),
        "sam, two groups": Ascent(0.1, most=(batch + 1) // 2), "adversarial": Ascent(adversary=adversary),
        "sam and adversarial": Ascent(0.1, adversary=adversary),
    }  # fmt: skip


def measure(name: str, train: PolicyName, size: int, batch: int, rounds: int, device: str) -> list[dict[str, object]]:
    """Return a row for every rule but the plain one."""
    ranks = Ranks(torch.device(device))
    torch.manual_seed(0)
    data = Batch(torch.rand(batch, 3, size, size) * 2 - 1, torch.arange(batch) % 10)
    rules, loops = make_rules(size, batch), {}
    for rule_name, rule in rules.items():
        model = timm.create_model(name, img_size=size, num_classes=10)
        policy.apply(model, policy.select(model, train))
        config = FinetuneConfig(epochs=rounds + 1)
        precision = make_precision("auto", ranks.device)
        loops[rule_name] = Loop(model, Classification(10), [_stream.Same(data, STEPS)], config, precision, rule, ranks)
    times: dict[str, list[float]] = {rule_name: [] for rule_name in rules}
    for i in range(rounds + 1):  # the first round warms up
        for rule_name, loop in loops.items():
            seconds = loop.run_epoch(False)["seconds"] / STEPS
            if i:
                times[rule_name].append(1000 * seconds)
    plain = times.pop("plain")
    return [
        {
            "comparison": f"{rule_name} / plain, time of a step",
            "case": f"{name} {size} px, batch {batch}, {train}",
            "first": round(statistics.median(found), 1), "second": round(statistics.median(plain), 1), "unit": "ms",
            "ratio": round(statistics.median(a / b for a, b in zip(found, plain, strict=True)), 3),
            "bound": f"<= {BOUND}", "rounds": rounds,
        }
        for rule_name, found in times.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--train", nargs="+", default=["full", "attn"], choices=["full", "attn", "head"])
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=_rows.RESULTS / "sam.csv")
    parser.add_argument("--skip-tests", action="store_true", help="only for trying out this script")
    args = parser.parse_args()
    if not args.skip_tests:
        _rows.require_green(
            ["tests/vtk/training/step_rules/test_sam.py", "tests/vtk/training/step_rules/test_adversarial.py"]
        )
    if args.threads:
        torch.set_num_threads(args.threads)
    cases = [(args.model, train, args.img_size, args.batch_size, args.rounds, args.device) for train in args.train]
    rows = [row for case in cases for row in measure(*case)]
    for row in rows:
        _rows.append(args.results, {**row, **_rows.context(args.device)})
    shown = [(r["comparison"], r["case"], r["first"], r["second"], r["unit"], r["ratio"], r["bound"]) for r in rows]
    console.table("Steps of two passes", ("comparison", "case", "first", "second", "unit", "ratio", "bound"), shown,
                  left=(0, 1, 4))  # fmt: skip


if __name__ == "__main__":
    main()
