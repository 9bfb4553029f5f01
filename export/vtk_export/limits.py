"""What a file may differ from torch in fp32, per precision."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of the gate; None where one does not apply.

    Attributes:
        error: largest error, as a fraction of the batch's largest absolute number.
        cosine: least cosine of an image's outputs with torch's.
        agreement: least share of ``--data`` images with torch's most likely class.
        top1: largest loss of accuracy, as a fraction, where ``--data`` says what is on the images.
    """

    error: float | None = None
    cosine: float | None = None
    agreement: float | None = None
    top1: float | None = None


LIMITS = {
    "fp32": Limits(error=1e-4),
    "fp16": Limits(cosine=0.9999, agreement=0.995),
    # eight bits of a mantissa: rounding one number is 8 times as coarse as in fp16, the angle grows as its square
    "bf16": Limits(cosine=0.999, agreement=0.98),
    "int8": Limits(cosine=0.7, agreement=0.9, top1=0.01),
}
"""Per kind of file. int8 rounds so coarsely that its cosine only finds a file that is wrong; its accuracy is judged."""
