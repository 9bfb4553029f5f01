"""Claims of the papers, each a comparison of two variants; `papers.verdicts` decides whether runs show it."""

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
        margin: of "as good as", in units of the metric (of a ratio: a share, 0.1 for 10 %); None where the paper says
            better.
        scale: "difference" compares variant − against, "ratio" the logarithm of variant / against: of what is positive
            and varies by factors, such as curvature, entropy, a loss or its rise under noise.
        tried: what was tried to show it, for the page where it is not shown.
    """

    paper: str
    experiment: str
    text: str
    metric: str
    variant: str
    against: str
    sign: Literal[1, -1]
    margin: float | None = None
    scale: Literal["difference", "ratio"] = "difference"
    tried: str = ""


_POLICIES = (
    "digits, class token, no smoothing of labels (1 seed): attention 86.3 %, all weights 85.3 %, FFN 77.7 %, "
    "classifier 48.0 %; photographs (4 seeds): attention 55.7 %, all weights 61.6 %, FFN 57.9 % at the learning rate "
    "0.001, 57.4 %, 58.8 % and 58.3 % at 0.003. These bases have seen 500 images: from DINOv2's ViT-S/14 attention has "
    "84.8 % of photographs (3 seeds) and all weights 81.3 % (the best of three rates, 1 seed; [results](summary.md))."
)
_SMOOTHED_SAM = (
    "smoothing of labels 0.1 (1 seed): top-1 88.0 % against 91.5 %, L^N 0.507 against 0.529, miss rate 31.5 % against "
    "25.0 %; class token, no smoothing (1 seed): top-1 88.0 % against 86.5 %."
)
_STEMS = (
    "digits, class token, no smoothing of labels, 20 epochs (1 seed): conv 92.8 % and patchify 69.2 % at the low rate, "
    "73.5 % and 23.2 % at the high one; similarity in the lower layers 0.07 and 0.16 at the low rate."
)
CLAIMS = (
    Claim("A", "parallel", "Parallel blocks are as accurate as sequential ones of the same size (margin 2 points)",
          "top1", "2 blocks of 2 branches", "4 blocks", 1, 0.02,
          tried="class token, no smoothing of labels: 88.3 % against 86.5 % (1 seed)."),
    Claim("A", "policies", "Fine-tuning attention alone is as accurate as fine-tuning all weights (margin 2 points)",
          "top1", "attn", "full", 1, 0.02,
          tried=_POLICIES),
    Claim("A", "policies", "Fine-tuning attention is more accurate than fine-tuning the FFN", "top1", "attn", "ffn", 1,
          tried=_POLICIES),
    Claim("A", "policies", "Fine-tuning attention is more accurate than training the head alone",
          "top1", "attn", "head", 1),
    Claim("A", "hmlp", "After masked image modelling, the hMLP stem is more accurate than the linear one",
          "top1", "hMLP stem", "linear stem", 1,
          tried="20 epochs of pre-training and 30 of fine-tuning, class token: 84.7 % against 87.5 % (1 seed); 12 and "
                "25 epochs: 83.8 and 82.8 % against 82.8 and 86.7 % (2 seeds); 40 epochs make the spread smaller."),
    Claim("B", "broadcast", "CB lowers the entropy of attention in deeper layers",
          "entropy_deep", "with CB", "without", -1, scale="ratio",
          tried="average pooling and a class token, digits and photographs (tables)."),
    Claim("B", "broadcast", "CB lowers the entropy of the class token's attention in deeper layers",
          "entropy_class_token_deep", "class token, with CB", "class token, without", -1, scale="ratio",
          tried="digits and photographs (tables)."),
    Claim("B", "broadcast", "CB is more accurate", "top1", "with CB", "without", 1,
          tried="class token (table), also without smoothing of labels: 90.3 % against 86.5 % of digits, and 35.3 % "
                "against 34.0 % of photographs after 40 epochs (1 seed each)."),
    Claim("C", "frequencies", "MSAs lower the high frequencies of feature maps",
          "high_frequencies", "after MSA", "before MSA", -1,
          tried="class token, no smoothing of labels, 25 epochs: −2.18 against −2.05 (1 seed)."),
    Claim("C", "frequencies", "MLPs raise the high frequencies of feature maps",
          "high_frequencies", "after MLP", "before MLP", 1),
    Claim("C", "frequencies", "MSAs lower the variance of feature maps",
          "map_variance", "after MSA", "before MSA", -1, scale="ratio",
          tried="class token, no smoothing of labels, 25 epochs: ratio 1.04 (1 seed)."),
    Claim("C", "frequencies", "MLPs raise the variance of feature maps",
          "map_variance", "after MLP", "before MLP", 1, scale="ratio"),
    Claim("C", "pooling", "Average pooling in place of the class token lowers the share of negative Hessian "
          "eigenvalues early in training", "negative_eigenvalues", "average pooling", "class token", -1,
          tried="no smoothing of labels: 16 % against 22 % after 4 epochs, 10 % against 26 % after 8 (3 seeds)."),
    Claim("C", "pooling", "Average pooling is more accurate than the class token",
          "top1", "average pooling", "class token", 1,
          tried="no smoothing of labels: 89.8 % against 86.5 % (1 seed)."),
    Claim("C", "local", "Attention within 5×5 patches is more accurate than global attention",
          "top1", "5×5", "global", 1),
    Claim("C", "local", "Attention within 5×5 patches has a lower training loss than global attention",
          "loss", "5×5", "global", -1, scale="ratio"),
    Claim("C", "alternet", "AlterNet is more accurate than the ResNet that it is built from",
          "top1", "AlterNet-18", "pre-activation ResNet-18", 1,
          tried="digits, no smoothing of labels: 98.5 % against 98.3 % (1 seed), near the ceiling of these images: "
                "therefore photographs, too (table)."),
    Claim("D", "sam", "SAM lowers the largest curvature λ_max", "lambda_max", "SAM", "AdamW", -1, scale="ratio"),
    Claim("D", "sam", "SAM lowers the loss under weight noise, L^N", "noisy_loss", "SAM", "AdamW", -1, scale="ratio",
          tried=_SMOOTHED_SAM),
    Claim("D", "sam", "SAM lowers the rise of the loss under weight noise, L^N − L",
          "noise_rise", "SAM", "AdamW", -1, scale="ratio"),
    Claim("D", "sam", "SAM is more accurate on images that were held out", "top1", "SAM", "AdamW", 1,
          tried=_SMOOTHED_SAM),
    Claim("D", "sam", "SAM lowers the miss rate half-way between images", "miss_rate", "SAM", "AdamW", -1,
          tried=_SMOOTHED_SAM),
    Claim("E", "stems", "At the high learning rate the conv stem is more accurate than the patchify stem",
          "top1", "conv stem, high rate", "patchify stem, high rate", 1, tried=_STEMS),
    Claim("E", "stems", "At the high learning rate the conv stem's training loss is lower",
          "loss", "conv stem, high rate", "patchify stem, high rate", -1, scale="ratio", tried=_STEMS),
    Claim("E", "stems", "The patchify stem loses accuracy at the high learning rate",
          "top1", "patchify stem, high rate", "patchify stem, low rate", -1, tried=_STEMS),
    Claim("E", "stems", "With the conv stem, tokens of the lower layers are less alike",
          "similarity_lower", "conv stem, low rate", "patchify stem, low rate", -1, tried=_STEMS),
)  # fmt: skip
