"""Predicted latencies of the fused models, written down before a run measures them.

The constants of `_cost` are fitted to the fused models that one commit measured in a CUDA graph; no constant that
a ceiling stands for may be more than 1.5 times from it. How much a prediction is worth is what the fit says of a model
and size that it has not seen: the table printed. Written to ``results/gpu_predictions.csv``, which `gpu.sh all` and
docs/results/performance.md set beside what is measured.

    python benchmarks/predict.py [--check]
"""

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import _bounds
import _fit
import _rows
from _cost import CEILING, NAMES, SIZES, Constants, Form, kernels_of, pass_us

COLUMNS = ("model", "px", "batch", "provider", "form", "ms", "git")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 256)
SUBJECTS = (*((name, 224) for name in SIZES), ("B/16", 384))
PROVIDERS: dict[str, dict[str, Form]] = {
    _bounds.FUSED: {"before": "before", "after": "after"},
    _bounds.FOLDED: {"before": "before, folded", "after": "after, folded"},
}
"""Provider of `e2e` to what is predicted of it, before and after the changes that `_cost.FORMS` names."""

NEAR = 0.02
"""Most that a committed prediction may differ from one made anew."""


def rows(constants: Constants, git: str) -> list[dict[str, str]]:
    """Return a row per model, size, batch, provider and form."""
    return [
        {"model": model, "px": str(px), "batch": str(batch), "provider": provider, "form": label,
         "ms": f"{1e-3 * pass_us(kernels_of(model, px, batch, form), constants):.4g}", "git": git}
        for model, px in SUBJECTS for batch in BATCHES
        for provider, forms in PROVIDERS.items() if provider == _bounds.FUSED or model in _bounds.FOLDED_MODELS
        for label, form in forms.items()
    ]  # fmt: skip


def differences(path: Path, made: Sequence[dict[str, str]]) -> list[str]:
    """Return what a committed file says otherwise than a fit does now."""
    key = COLUMNS[:5]
    old = {tuple(r[k] for k in key): float(r["ms"]) for r in _rows.read(path)}
    new = {tuple(r[k] for k in key): float(r["ms"]) for r in made}
    found = [f"{' '.join(k)}: only in one of both" for k in old.keys() ^ new.keys()]
    return found + [
        f"{' '.join(k)}: {old[k]} ms there, {new[k]} ms now"
        for k in new if k in old and abs(old[k] / new[k] - 1) > NEAR
    ]  # fmt: skip


def report(measured: _fit.Measured, constants: Constants) -> list[str]:
    """Return lines: the constants beside their ceilings, and each latency predicted without its model and size."""
    lines = []
    for name in NAMES:
        value = getattr(constants, name)
        ceiling = measured.ceilings.get(CEILING.get(name, ""))
        beside = "" if ceiling is None else f"{value / ceiling:>7.2f} of the {ceiling:g} measured"
        lines.append(f"{name:<12} {value:>9.4g}{beside}")
    held_out = _fit.leave_one_out(measured)
    seen = _fit.predictions(measured.latencies, constants)
    lines.append("predicted / measured − 1: without its model and size in the fit, and with it")
    for cell, ratio in held_out.items():
        ms = 1e-3 * measured.latencies[cell]
        name = f"{cell[0]:<6} {cell[1]} px  batch {cell[2]:>3}"
        lines.append(f"{name} {ms:>8.3f} ms {ratio - 1:>+7.1%} {1e-3 * seen[cell] / ms - 1:>+7.1%}")
    lines.append(f"largest error of what was left out: {max(abs(r - 1) for r in held_out.values()):.1%}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=_rows.RESULTS, help="folder of gpu_e2e.csv and the others")
    parser.add_argument("--check", action="store_true", help="only say whether the committed predictions are these")
    args = parser.parse_args(argv)
    measured = _fit.load(args.results)
    if not measured.latencies or not set(CEILING.values()) <= measured.ceilings.keys():
        print(f"predict.py: {args.results} holds no rows of commit {_fit.COMMIT} to fit to", file=sys.stderr)
        return 1
    constants = _fit.fit(measured)
    path = args.results / _bounds.PREDICTIONS
    if args.check:
        found = differences(path, rows(constants, ""))
        print("\n".join(found[:20]) or f"{path.name} is what the model predicts")
        return 1 if found else 0
    print("\n".join(report(measured, constants)))
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(constants, _rows.code_version()))
    _rows.replace(path, text.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main())
