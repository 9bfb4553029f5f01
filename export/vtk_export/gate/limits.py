"""Error bounds of the gate, per precision."""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of the gate; None if one does not apply.

    Attributes:
        error: largest error, as a fraction of the batch's largest absolute number.
        cosine: least cosine of an image's outputs with torch's.
        mean: least mean cosine over the ``--data`` images; None where `cosine` bounds that too.
        agreement: least share of ``--data`` images with torch's most likely class.
        top1: largest loss of accuracy, as a fraction, where ``--data`` says what is on the images.
        batch: largest change of an image's outputs by the other images of its call, as a fraction of the largest
            output: another kernel's rounding, which int8 enlarges by up to a step of its own.
    """

    error: float | None = None
    cosine: float | None = None
    mean: float | None = None
    agreement: float | None = None
    top1: float | None = None
    batch: float | None = None


LIMITS = {
    "fp32": Limits(error=1e-4, batch=1e-4),
    "fp16": Limits(cosine=0.9999, agreement=0.995, batch=0.01),
    # eight bits of a mantissa: rounding one number is 8 times as coarse as in fp16, the angle grows as its square
    "bf16": Limits(cosine=0.999, agreement=0.98, batch=0.08),
    # an image's cosine is 0.7 where rounding changes the output by as much as its size. Over 1000 photographs, a
    # fine-tuned ViT-S/14 has a mean of 0.995 (static) and 0.997 (dynamic) and no image below 0.93; with the rows of one
    # of six matrices shifted by one, the mean was 0.77 to 0.947, though up to 97 % of the classes stayed
    "int8": Limits(cosine=0.7, mean=0.95, agreement=0.9, top1=0.01, batch=0.03),
    # e4m3 has a mantissa of 3 bits, and each number an error of up to 6 %: what the answers are is counted
    "fp8": Limits(cosine=0.9, mean=0.98, agreement=0.99, batch=0.08),
}
"""Per kind of file. int8 rounds so coarsely that its cosine only finds a file that is wrong; its accuracy is judged."""


def with_budget(limits: Limits, max_drop: float | None) -> Limits:
    """Return the bounds of a file that was asked to change the class of at most ``max_drop`` percent of the images.

    Accuracy cannot drop by more; images that were right and wrong alike change class, so it drops by less.
    """
    if max_drop is None:
        return limits
    return dataclasses.replace(limits, agreement=1 - max_drop / 100, top1=max_drop / 100)


BATCHES = (1, 2, 3, 7, 16)
"""Batch sizes that a file with a dynamic batch is run with."""

RELATIVE_BOUND = LIMITS["fp32"].error or 0.0
"""Largest error of an fp32 file, as a fraction of the batch's largest absolute logit."""

LEAST_COSINE = 0.999
"""Of outputs with the preprocessing of the graph and with Pillow's: a level more or less in some pixels."""
