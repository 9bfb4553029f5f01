"""Writes docs/results/papers.md from benchmarks/results/papers.csv; ``--check`` says whether it is up to date.

Usage: python docs/_generate/papers.py [--check]

Nothing is said of a paper that the rows do not say: verdicts follow from the rule in benchmarks/papers/verdicts.py.
Rows of settings that are not those of today are left out.
"""

import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from _pages import write_or_check
from _tables import Row, load, table, where

# before this folder, whose papers.py this is
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from papers.claims import CLAIMS, Claim
from papers.experiments import current_settings, same_settings
from papers.verdicts import Outcome, judge

PAGE = Path(__file__).resolve().parents[1] / "results" / "papers.md"
RESULTS = PAGE.parents[2] / "benchmarks" / "results"

HEAD = """# The papers' claims, tested at small scale

Written by `make docs` from `benchmarks/results/papers.csv`; do not edit by hand. `make papers` does the runs that are
missing: models at most 192 wide, at most 1,000 training images, less than 90 seconds each, on a CPU. The [papers'
key](../concepts/papers-key.md) has the papers and their ids.

```bash
make papers                                                      # generated images of digits, nothing else needed
.venv/bin/python benchmarks/papers --data FOLDER --name "Pets"   # images of your own, as `vtk train` takes them
.venv/bin/python benchmarks/papers --only A/hmlp D --seeds 0 --dry
```

Such runs are far from those of the papers: an effect that needs large images or long training cannot show. Therefore
one rule decides every claim, and a claim that does not show is reported as such. Variants are compared seed by seed on
the same images in the same order. *Shown*: for every seed the difference has the sign that the paper says, and the mean
is at least two standard errors from 0. *Reversed*: the same with the opposite sign. *Not shown here*: anything else. A
claim of "as accurate as" is *shown* if the mean difference minus two standard errors is above the given margin, and
*reversed* if the mean difference plus two standard errors is below it.

Accuracies are those of the last epoch on held-out images. Tables give the mean ± the standard deviation over seeds.
"""

PAPERS = {
    "A": "Touvron et al. 2022", "B": "Hyeon-Woo et al. 2023", "C": "Park and Kim 2022", "D": "Chen et al. 2022",
    "E": "Wang et al. 2022",
}  # fmt: skip
"""Author and year of the ids in the results file."""
TITLES = {
    ("A", "parallel"): "Parallel blocks",
    ("A", "policies"): "Weights to fine-tune",
    ("A", "hmlp"): "The hMLP stem with masked image modelling",
    ("B", "broadcast"): "Context Broadcasting and the density of attention",
    ("C", "frequencies"): "Frequencies and variance of feature maps",
    ("C", "pooling"): "Average pooling in place of the class token",
    ("C", "local"): "Local attention",
    ("C", "alternet"): "AlterNet",
    ("D", "sam"): "Sharpness-aware minimisation",
    ("E", "stems"): "The conv stem",
}
TEXT = {
    ("A", "parallel"): "The same blocks with the same random initial weights, in sequence or as two parallel branches "
                       "(`--branches 2`).",
    ("A", "policies"): "A base is trained on one half of the classes; `--train` full, attn, ffn and head fine-tune it "
                       "on the other half, all with the same learning rate.",
    ("A", "hmlp"): "`vtk pretrain --method simmim`, then `vtk finetune --train full` from its backbone, on the same "
                   "images.",
    ("B", "broadcast"): "A ViT with and without `--cb` (upper half of the blocks). Entropy of attention in nats, "
                        "mean over heads and queries, on held-out images; *deep* is the upper half of the layers. "
                        "*Forward* is the time of a forward pass with CB divided by that without, measured in turn.",
    ("C", "frequencies"): "*High* is the Δ log amplitude of the highest frequency that the paper plots, in nats, and "
                          "*variance* that over the positions of a map, on {images} held-out images: means over the "
                          "blocks of one ViT with 8×8 patches, of the map before and after each attention or MLP.",
    ("C", "pooling"): "*Negative* is the share of negative values among the {hessian[top]} largest Hessian eigenvalues "
                      "of each mini-batch of {hessian[batch_size]}, NEP, and *positive* the mean of the positive ones, "
                      "APE: of the training loss with its l2 term, on {hessian[images]} augmented training images, "
                      "after runs of {early[0]} and of {early[1]} epochs (mean).",
    ("C", "local"): "A ViT with 8×8 patches and `--local-attention 5` or without.",
    ("C", "alternet"): "Both have the same widths and steps; attention replaces convolutions by the paper's build-up "
                       "rule.",
    ("D", "sam"): "λ_max of the training loss's Hessian (Lanczos), L^N with noise of σ = {sigma} on every weight "
                  "({draws} draws), *miss rate* half-way between training images; on {images} training images "
                  "without augmentation. ρ = {rho}. *Step* is the time of a training step divided by AdamW's.",
    ("E", "stems"): "The stems at two learning rates, {lr[low]} and {lr[high]}, without gradient clipping. "
                    "*Similarity* is the mean cosine of the tokens of an image (eq. 5), over the lower and the upper "
                    "half of stem, position embedding and blocks.",
}  # fmt: skip
NAMES = {
    "top1": "top-1, %", "loss": "training loss", "val_loss": "held-out loss", "entropy_deep": "entropy, deep",
    "entropy_shallow": "entropy, shallow", "entropy_class_token_deep": "class token, deep",
    "entropy_uniform": "uniform", "parameters": "parameters", "forward_ratio": "forward", "lambda_max": "λ_max",
    "train_loss": "L", "noisy_loss": "L^N", "noise_rise": "L^N − L", "miss_rate": "miss rate, %", "step_ratio": "step",
    "similarity_stem": "similarity, stem", "similarity_lower": "similarity, lower",
    "similarity_upper": "similarity, upper", "high_frequencies": "high",
    "map_variance": "variance", "negative_eigenvalues": "negative, %", "positive_eigenvalues": "positive",
    "diverged": "diverged, %",
}  # fmt: skip
"""Columns that are shown, in order."""
_PERCENT = ("top1", "miss_rate", "negative_eigenvalues", "diverged")
Values = dict[str, dict[str, dict[str, float]]]
"""Metric to variant to seed to value."""


def page(rows: Sequence[Row]) -> str:
    """Return the page for the rows of the results file."""
    parts = [HEAD]
    if not rows:
        parts.append("Not measured yet.\n")
    newest = _newest(rows)
    if newest:
        parts += ["## Summary\n", _summary(newest), ""]
    for key, title in TITLES.items():
        found = {data: own for (paper, name, data), own in newest.items() if (paper, name) == key}
        if found:
            parts += [f"## {title} ({PAPERS[key[0]]})\n", *_section(key, found)]
    return "\n".join(parts).rstrip("\n") + "\n"


def _newest(rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Group rows by experiment and images; of several settings the last that was written counts."""
    current = current_settings()
    rows = [row for row in rows if (row["paper"], row["experiment"], same_settings(row["settings"])) in current]
    last: dict[tuple[str, str, str], str] = {}
    for row in rows:
        last[row["paper"], row["experiment"], row["data"]] = row["digest"]
    return {
        key: [r for r in rows if (r["paper"], r["experiment"], r["data"]) == key and r["digest"] == digest]
        for key, digest in last.items()
    }


def _values(rows: Sequence[Row]) -> Values:
    """Return the numbers; of an experiment that was done again the last count."""
    found: Values = {}
    for row in rows:
        found.setdefault(row["metric"], {}).setdefault(row["variant"], {})[row["seed"]] = float(row["value"])
    return found


def _summary(newest: dict[tuple[str, str, str], list[Row]]) -> str:
    names = list(dict.fromkeys(data for _, _, data in newest))
    lines = []
    for claim in CLAIMS:
        cells = []
        for data in names:
            rows = newest.get((claim.paper, claim.experiment, data), [])
            cells.append(judge(claim, _values(rows).get(claim.metric, {})).verdict)
        lines.append([PAPERS[claim.paper], claim.text, *cells])
    return table(["paper", "claim", *names], lines, left=2 + len(names))


def _section(key: tuple[str, str], found: dict[str, list[Row]]) -> Iterator[str]:
    settings = json.loads(next(iter(found.values()))[-1]["settings"])
    yield TEXT[key].format(**{k: v for k, v in settings.items() if k not in ("common", "train")})
    yield f"\n`{_plain(settings)}`\n"
    for data, rows in found.items():
        values = _values(rows)
        seeds = sorted({row["seed"] for row in rows}, key=int)
        yield f"**{data}**, {int(rows[-1]['train_images']):,} training images, seeds {', '.join(seeds)}:\n"
        yield _numbers(rows, values)
        yield ""
        claims = [claim for claim in CLAIMS if (claim.paper, claim.experiment) == key]
        yield "\n".join(_line(claim, judge(claim, values.get(claim.metric, {}))) for claim in claims)
        yield f"\n{where(rows)}\n"


def _numbers(rows: Sequence[Row], values: Values) -> str:
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    shown = [metric for metric in NAMES if metric in values and not _all_zero(metric, values[metric])]
    lines = [
        [variant, *(_cell(metric, list(values[metric].get(variant, {}).values())) for metric in shown)]
        for variant in variants
    ]
    return table(["", *(NAMES[metric] for metric in shown)], lines)


def _all_zero(metric: str, of: dict[str, dict[str, float]]) -> bool:
    return metric == "diverged" and not any(value for seeds in of.values() for value in seeds.values())


def _cell(metric: str, values: list[float]) -> str:
    values = [100 * v if metric in _PERCENT else v for v in values if not math.isnan(v)]
    if not values:
        return "–"
    mean = statistics.fmean(values)
    if metric == "parameters":
        return f"{mean:,.0f}"
    return _number(metric, mean) + (f" ± {_number(metric, statistics.stdev(values))}" if len(values) > 1 else "")


def _number(metric: str, value: float) -> str:
    return f"{value:.1f}" if metric in _PERCENT or abs(value) >= 10 else f"{value:.3f}"


def _line(claim: Claim, outcome: Outcome) -> str:
    if not outcome.look:
        return f"- {claim.text}: *{outcome.verdict}*."
    sizes = [_difference(claim, x) for x in (outcome.difference, outcome.low, outcome.high)]
    return (
        f"- {claim.text}: **{outcome.verdict}** ({claim.variant} against {claim.against}: {NAMES[claim.metric]} "
        f"{sizes[0]} ({sizes[1]} to {sizes[2]}), {outcome.seeds} seeds)."
    )


def _difference(claim: Claim, value: float) -> str:
    """Return a difference with its sign, or a ratio."""
    if claim.scale == "ratio":
        return f"× {value:.3g}"
    size = _number(claim.metric, abs(value) * (100 if claim.metric in _PERCENT else 1))
    return ("" if float(size) == 0 else "+" if value > 0 else "−") + size


def _plain(settings: dict) -> str:
    """Return settings as words: those that all runs share, then those of each kind of run."""
    lists = {name: settings[name] for name in ("kwargs", "attention") if name in settings}
    common = {**settings["common"], **lists, **settings.get("train", {})}
    words = [f"{name}={_short(value)}" for name, value in common.items()]
    for name in ("pretrain", "finetune"):
        if name in settings:
            words.append(f"{name}: " + " ".join(f"{k}={_short(v)}" for k, v in settings[name].items()))
    return "; ".join([" ".join(words[: len(common)]), *words[len(common) :]])


def _short(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page(load("papers.csv", RESULTS)), "the results"))
