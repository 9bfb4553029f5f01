"""Held-out accuracy of each training policy on one folder of images.

    python benchmarks/policies.py DATA --weights FILE --model NAME --img-size 56

Attention only is trained with several seeds at the default learning rate; full, ffn and head with one seed at each of
several rates, of which the best is shown. Every run is one row of ``results/policies.csv``.
"""

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import _rows

RATES = (1e-5, 3e-5, 1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--model", default="vit_small_patch14_dinov2")
    parser.add_argument("--no-pretrained", action="store_true")
    parser.add_argument("--img-size", type=int, default=56)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of attention only")
    parser.add_argument("--rates", type=float, nargs="*", default=list(RATES), help="of full, ffn and head")
    parser.add_argument("--policies", nargs="*", default=["attn", "full", "ffn", "head"])
    parser.add_argument("--results", type=Path, default=_rows.RESULTS / "policies.csv")
    parser.add_argument("--skip-tests", action="store_true", help="only for trying out this script")
    args = parser.parse_args()
    if not args.skip_tests:
        _rows.require_green(["tests/vtk/training"])

    from vtk import console
    from vtk.training.finetune import finetune
    from vtk.training.finetune_config import FinetuneConfig

    base = FinetuneConfig(
        data=args.data, weights=args.weights, model=args.model, img_size=args.img_size, epochs=args.epochs,
        batch_size=args.batch_size, workers=args.workers, pretrained=not args.no_pretrained,
    )  # fmt: skip
    plan = [("attn", base.lr, seed) for seed in args.seeds if "attn" in args.policies]
    plan += [(p, lr, 0) for p in ("full", "ffn", "head") if p in args.policies for lr in args.rates]
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, lr, seed) in enumerate(plan):
            console.say(f"run {i + 1} of {len(plan)}: --train {name} --lr {lr} --seed {seed}", style="bold")
            config = replace(base, train=name, lr=lr, seed=seed, out=Path(folder) / str(i))
            result = finetune(config)
            row = {
                "data": args.data.name, "model": args.model, "img_size": args.img_size, "epochs": args.epochs,
                "batch_size": args.batch_size, "policy": name, "lr": lr, "head_lr_mult": config.head_lr_mult,
                "seed": seed, "top1": result.metrics.top1, "loss": round(result.metrics.loss, 4),
                "best_epoch": result.best_epoch, "trained": result.census.trained, "total": result.census.total,
                "precision": result.precision,
            }  # fmt: skip
            device = "cpu" if result.precision == "fp32" else "cuda"
            _rows.append(args.results, {**row, **_rows.context(device)})
            found.setdefault(name, []).append((result.metrics.top1, lr))
    table = []
    for name, scores in found.items():
        values = [top1 for top1, _ in scores]
        if name == "attn":
            spread = f"{min(values):.3f} to {max(values):.3f}, {len(values)} seeds"
            table.append((name, f"{statistics.mean(values):.3f}", spread))
        else:
            best = max(scores)
            table.append((name, f"{best[0]:.3f}", f"best of {len(values)} rates: {best[1]:g}"))
    console.table("Held-out top-1", ("policy", "top-1", "over"), table, left=(0, 2))


if __name__ == "__main__":
    main()
