"""Claims of the papers, each a comparison of two variants with the rule that decides whether runs show it.

Variants are compared seed by seed: both see the same images in the same order. Of the differences d over n seeds the
mean and the standard error s/√n count:

- **shown**: every seed's difference has the paper's sign, and the mean is at least two standard errors from 0;
- **reversed**: the same with the opposite sign;
- **not shown here**: anything else; so few seeds cannot tell.

A claim that one variant is as good as another is shown where the mean difference is at most a margin to its
disadvantage, and still so less two standard errors.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, and the numbers that would show it.

    Attributes:
        paper: A to E.
        experiment: whose numbers.
        text: the sentence.
        metric: column.
        variant: of which the paper says something.
        against: what it is compared with.
        sign: +1 where the paper says higher, −1 lower.
        margin: of "as good as"; None where the paper says better.
    """

    paper: str
    experiment: str
    text: str
    metric: str
    variant: str
    against: str
    sign: Literal[1, -1]
    margin: float | None = None


CLAIMS = (
    Claim("A", "parallel", "Parallel blocks are as accurate as sequential ones of the same size (margin 2 points)",
          "top1", "6 blocks of 2 branches", "12 blocks", 1, 0.02),
    Claim("A", "policies", "Fine-tuning attention alone is as accurate as fine-tuning all weights (margin 2 points)",
          "top1", "attn", "full", 1, 0.02),
    Claim("A", "policies", "Fine-tuning attention is more accurate than fine-tuning the FFN", "top1", "attn", "ffn", 1),
    Claim("A", "policies", "Fine-tuning attention is more accurate than training the head alone",
          "top1", "attn", "head", 1),
    Claim("A", "hmlp", "After masked image modelling, the hMLP stem is more accurate than the linear one",
          "top1", "hMLP stem", "linear stem", 1),
    Claim("B", "broadcast", "CB lowers the entropy of attention in deeper layers",
          "entropy_deep", "with CB", "without", -1),
    Claim("B", "broadcast", "CB lowers the entropy of the class token's attention in deeper layers",
          "entropy_class_token_deep", "with CB", "without", -1),
    Claim("B", "broadcast", "CB is more accurate", "top1", "with CB", "without", 1),
    Claim("C", "alternet", "AlterNet is more accurate than the ResNet that it is built from",
          "top1", "AlterNet-18", "pre-activation ResNet-18", 1),
    Claim("D", "sam", "SAM lowers the largest curvature λ_max", "lambda_max", "SAM", "AdamW", -1),
    Claim("D", "sam", "SAM lowers the loss under weight noise, L^N", "noisy_loss", "SAM", "AdamW", -1),
    Claim("D", "sam", "SAM is more accurate on images that were held out", "top1", "SAM", "AdamW", 1),
    Claim("D", "sam", "SAM lowers the miss rate half-way between images", "miss_rate", "SAM", "AdamW", -1),
    Claim("E", "stems", "At the high learning rate the conv stem is more accurate than the patchify stem",
          "top1", "conv stem, high rate", "patchify stem, high rate", 1),
    Claim("E", "stems", "At the high learning rate the conv stem's training loss is lower",
          "loss", "conv stem, high rate", "patchify stem, high rate", -1),
    Claim("E", "stems", "The patchify stem loses accuracy at the high learning rate",
          "top1", "patchify stem, high rate", "patchify stem, low rate", -1),
    Claim("E", "stems", "With the conv stem, tokens of the lower layers are less alike",
          "similarity_lower", "conv stem, low rate", "patchify stem, low rate", -1),
)  # fmt: skip

Verdict = Literal["shown", "reversed", "not shown here", "not measured"]


@dataclass(frozen=True)
class Outcome:
    """A claim's numbers.

    Attributes:
        verdict: by the rule above.
        difference: mean of variant − against; NaN without any seed.
        error: its standard error; NaN of one seed.
        seeds: how many have both.
    """

    verdict: Verdict
    difference: float
    error: float
    seeds: int


def judge(claim: Claim, values: Mapping[str, Mapping[str, float]]) -> Outcome:
    """Judge a claim.

    Args:
        claim: what is said.
        values: variant to seed to value of the claim's metric.
    """
    one, two = values.get(claim.variant, {}), values.get(claim.against, {})
    differences = [one[seed] - two[seed] for seed in one if seed in two]
    differences = [d for d in differences if not math.isnan(d)]
    if not differences:
        return Outcome("not measured", math.nan, math.nan, 0)
    mean, count = statistics.fmean(differences), len(differences)
    error = statistics.stdev(differences) / math.sqrt(count) if count > 1 else math.nan
    if count < 2:
        return Outcome("not shown here", mean, error, count)
    signed = [claim.sign * d for d in differences]
    return Outcome(_verdict(signed, error, claim.margin), mean, error, count)


def _verdict(signed: Sequence[float], error: float, margin: float | None) -> Verdict:
    mean = statistics.fmean(signed)
    if margin is not None:
        return (
            "shown" if mean - 2 * error >= -margin else "reversed" if mean + 2 * error < -margin else "not shown here"
        )
    if all(d > 0 for d in signed) and mean >= 2 * error:
        return "shown"
    if all(d < 0 for d in signed) and -mean >= 2 * error:
        return "reversed"
    return "not shown here"
