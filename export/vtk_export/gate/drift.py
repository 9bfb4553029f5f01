"""Compares the outputs of two kinds of preprocessing, and generates images of several sizes to preprocess."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from vtk.card import InputSpec
from vtk.data.random_images import smooth_bytes

COUNT = 16
"""Images of ``--data`` that are compared, at most."""

DRAWN = "drawn images of several sizes"

# sides in shares of the model's: enlarged, reduced, wide, tall, and as they are
_SHAPES = ((0.7, 0.9), (1.5, 2.2), (1.0, 2.5), (2.1, 1.3), (1.0, 1.0))


@dataclass(frozen=True)
class Drift:
    """Outputs with another preprocessing, compared with PyTorch on Pillow's.

    Attributes:
        count: images, each of its own size where they have one.
        what: what they are.
        cosine_min: smallest cosine of an image's outputs.
        error: largest absolute difference.
        relative: the same as a fraction of the largest absolute output.
        agreement: share of images with the same most likely class; NaN of features.
    """

    count: int
    what: str
    cosine_min: float
    error: float
    relative: float
    agreement: float


def compare_outputs(want: Tensor, have: Tensor, what: str, *, classes: bool = True) -> Drift:
    """Compare outputs (images, n) with those of Pillow's preprocessing.

    Args:
        want: with Pillow's.
        have: with the other.
        what: the images are.
        classes: the outputs have a most likely class; False of features.
    """
    want, have = want.double(), have.double()
    error = (want - have).abs().max().item()
    return Drift(
        count=len(want),
        what=what,
        cosine_min=F.cosine_similarity(want, have, dim=1).min().item(),
        error=error,
        relative=error / max(want.abs().max().item(), 1e-30),
        agreement=(want.argmax(1) == have.argmax(1)).double().mean().item() if classes else math.nan,
    )


def drawn_images(spec: InputSpec, seed: int) -> Iterator[np.ndarray]:
    """Yield images (height, width, 3) uint8 of five sizes: coarse noise made smooth, as the gate's random images."""
    rng = np.random.default_rng(seed)
    for down, across in _SHAPES:
        yield smooth_bytes(rng, max(round(down * spec.height), 1), max(round(across * spec.width), 1))
