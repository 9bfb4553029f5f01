"""Writes docs/results/papers.md from benchmarks/results/papers.csv; ``--check`` says whether it is up to date.

Usage: python docs/_generate/papers.py [--check]

Nothing is said of a paper that the rows do not say: verdicts follow from the rule in benchmarks/papers/verdicts.py.
Rows of settings that are not those of today are left out.
"""

import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from _claims import Judged, attempts, claims_table, counts, judge_all, number, power, summary
from _pages import write_or_check
from _tables import Row, load, table, where
from papers import looks  # of benchmarks, where `_claims` looks first
from papers.claims import CLAIMS, Claim
from papers.experiments import current_settings, same_settings
from papers.jobs import WHOLE_JOB
from papers.schedule import values_of

PAGE = Path(__file__).resolve().parents[1] / "results" / "papers.md"
RESULTS = PAGE.parents[2] / "benchmarks" / "results"

HEAD = f"""# The papers' claims, tested at small scale

Written by `make docs` from `benchmarks/results/papers.csv`; do not edit by hand. `make papers` does the runs that are
missing: small models of at most 1,000 training images, on a CPU, each run less than 90 seconds of one core. The
[papers' key](../concepts/papers-key.md#how-claims-are-tested) has the papers, their ids and the test in full.

```bash
make papers                                                       # generated images of digits, nothing else needed
.venv/bin/python benchmarks/papers --images digits Pets=FOLDER    # and images of your own, as `vtk train` takes them
.venv/bin/python benchmarks/papers --only A/hmlp D --seeds 0 --dry
```

Such runs are far from those of the papers: an effect that needs large images or long training cannot show. Therefore
one rule decides every claim, and one that does not show is reported as such, with the difference that would have shown.
Variants are compared seed by seed, on the same images in the same order, after {looks.SEEDS[0]} seeds and, where these
do not decide every claim of an experiment, after {looks.SEEDS[1]}.

| column | meaning |
| --- | --- |
| verdict | *shown*: the mean difference is on the paper's side of 0, beyond O'Brien and Fleming's bound of that look; *reversed*: on the other side, beyond it; *not shown here*: neither. "As accurate as" is the same test of the margin in place of 0. Both looks together are wrong in {looks.LEVEL:.0%} of claims without any effect. |
| after Holm | the verdict when the chance of any wrong one among all claims is kept at {looks.LEVEL:.0%} |
| seeds | how many decided; a claim that {looks.SEEDS[0]} seeds decide is not judged again |
| mean (interval) | difference or, of curvature, noise, entropy and losses, ratio; the interval leaves out 0 (1; the margin) exactly when the look decides |
| p | the smallest level at which the looks decide |
| detectable | the true difference or ratio that these runs show with a chance of {looks.POWER:.0%}, given their spread: (t of the look + t of {looks.POWER:.0%}) · s / √seeds |

Accuracies are those of the last epoch on held-out images. Tables give the mean ± the standard deviation over seeds.
"""  # noqa: E501

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
    ("B", "broadcast"): "A ViT with and without `--cb` (upper half of the blocks), with average pooling or a "
                        "class token. Entropy of attention in nats, mean over heads and queries, on held-out images; "
                        "*deep* is the upper half of the layers. *Forward* is the time of a forward pass with CB "
                        "divided by that without, measured in turn.",
    ("C", "frequencies"): "*High* is the Δ log amplitude of the highest frequency that the paper plots, in nats, and "
                          "*variance* that over the positions of a map, on {images} held-out images: means over the "
                          "blocks of one ViT with 8×8 = 64 patches, of the map before and after each attention or MLP.",
    ("C", "pooling"): "*Negative* is the share of negative values among the {hessian[top]} largest Hessian eigenvalues "
                      "of each mini-batch of {hessian[batch_size]}, NEP, and *positive* the mean of the positive ones, "
                      "APE: of the training loss with its l2 term, on {hessian[images]} augmented training images, "
                      "after runs of {early[0]} and of {early[1]} epochs (mean).",
    ("C", "local"): "A ViT with 8×8 = 64 patches, without and with `--local-attention 5`.",
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
    "similarity_upper": "similarity, upper", "high_frequencies": "high", "map_variance": "variance",
    "negative_eigenvalues": "negative, %", "positive_eigenvalues": "positive", "diverged": "diverged, %",
    "cpu_seconds": "CPU s",
}  # fmt: skip
"""Columns that are shown, in order; what ends in % is a share."""


def page(rows: Sequence[Row], claims: Sequence[Claim] = CLAIMS) -> str:
    """Return the page for the rows of the results file."""
    parts = [HEAD]
    newest = _newest(rows)
    if not newest:
        parts.append("Not measured yet.\n")
    judged = judge_all(newest, claims) if newest else []
    if newest:
        parts += [
            "## Summary\n",
            " ".join(filter(None, (counts(judged), power(judged, NAMES), _costs(newest)))) + "\n",
            summary(judged, PAPERS),
            "",
        ]
    for key, title in TITLES.items():
        found = {data: own for (paper, name, data), own in newest.items() if (paper, name) == key}
        if found:
            own = [one for one in judged if (one.claim.paper, one.claim.experiment) == key]
            parts += [f"## {title} ({PAPERS[key[0]]})\n", *_section(key, found, own)]
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


def _costs(newest: Mapping[tuple[str, str, str], Sequence[Row]]) -> str:
    """Say what all jobs took, each run counted in the job that trained it; of a job done again the last counts."""
    costs = [values_of(rows).get("cpu_seconds", {}) for rows in newest.values()]
    whole = sum(sum(own.get(WHOLE_JOB, {}).values()) for own in costs)
    runs = [value for own in costs for name, seeds in own.items() if name != WHOLE_JOB for value in seeds.values()]
    longest = max(runs, default=math.nan)
    return f"All jobs took {whole / 60:.0f} minutes of one core, and the longest run {longest:.0f} s."


def _section(key: tuple[str, str], found: dict[str, list[Row]], judged: Sequence[Judged]) -> Iterator[str]:
    last = ""
    for data, rows in found.items():
        settings = json.loads(rows[-1]["settings"])
        if (text := _settings(key, settings)) != last:
            yield text
        last = text
        seeds = sorted({int(row["seed"]) for row in rows})
        yield f"**{data}**, {int(rows[-1]['train_images']):,} training images, {_seeds(seeds)}:\n"
        yield _numbers(rows)
        own = [one for one in judged if one.data == data]
        yield f"\n{claims_table(own, NAMES)}\n"
        yield f"{where(rows)}\n"
    if tried := attempts(judged):
        yield "What was tried:\n\n" + "\n".join(tried) + "\n"


def _settings(key: tuple[str, str], settings: dict) -> str:
    text = TEXT[key].format(**{k: v for k, v in settings.items() if k not in ("common", "train")})
    return f"{text}\n\n`{_plain(settings)}`\n"


def _seeds(seeds: Sequence[int]) -> str:
    if len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _numbers(rows: Sequence[Row]) -> str:
    values = values_of(rows)
    variants = list(dict.fromkeys(row["variant"] for row in rows if row["variant"] != WHOLE_JOB))
    shown = [metric for metric in NAMES if metric in values and not _all_zero(metric, values[metric])]
    lines = [
        [variant, *(_cell(metric, list(values[metric].get(variant, {}).values())) for metric in shown)]
        for variant in variants
    ]
    return table(["", *(NAMES[metric] for metric in shown)], lines)


def _all_zero(metric: str, of: Mapping[str, Mapping[str, float]]) -> bool:
    return metric == "diverged" and not any(value for seeds in of.values() for value in seeds.values())


def _cell(metric: str, values: list[float]) -> str:
    values = [v for v in values if not math.isnan(v)]
    if not values:
        return "–"
    mean = statistics.fmean(values)
    if metric == "parameters":
        return f"{mean:,.0f}"
    name = NAMES[metric]
    return number(name, mean) + (f" ± {number(name, statistics.stdev(values), mean)}" if len(values) > 1 else "")


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
