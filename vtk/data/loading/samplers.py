"""Orders of an epoch's images: shuffled, repeated augmentation, and classes drawn equally often."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Sampler

from vtk.data.audit.result import Sample

MASK = (1 << 64) - 1
PASSES = 1 << 32
"""Offset between the epochs in augmentation seeds of an image's repetitions; more than any run has epochs."""


class EpochSampler(Sampler[tuple[int, int]]):
    """Yields (epoch, index) pairs; the shuffled order depends only on seed and epoch. Subclasses override `order`."""

    def __init__(self, length: int, *, shuffle: bool, seed: int) -> None:
        self.length, self.shuffle, self.seed, self.epoch, self.first = length, shuffle, seed, 0, 0

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Set the epoch (from 0) of the next pass, and the index in its order (from 0) at which the pass starts."""
        self.epoch, self.first = epoch, first

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return itertools.islice(self.order(), self.first, None)

    def order(self) -> Iterator[tuple[int, int]]:
        """Yield the whole epoch."""
        epoch = self.epoch
        if not self.shuffle:
            return ((epoch, i) for i in range(self.length))
        generator = torch.Generator().manual_seed(mix(self.seed, epoch, self.length))
        return ((epoch, i) for i in torch.randperm(self.length, generator=generator).tolist())


class RepeatSampler(EpochSampler):
    """Repeated augmentation (Hoffer et al. 2020): each image ``repeats`` times in a row, at the usual epoch length.

    The order is that of timm's ``RepeatAugSampler`` over all its processes: copies are adjacent in a batch, so that
    each of several processes, which take every W-th image, augments another copy. timm rounds the epoch down to a
    multiple of 256 images; here it is not rounded, and the last image may have fewer copies. The order depends only on
    seed and epoch.

    Args:
        length: number of images.
        repeats: copies of each image; an epoch has about length / repeats images.
        seed: random seed of order and augmentation.
    """

    def __init__(self, length: int, repeats: int, seed: int) -> None:
        super().__init__(length, shuffle=True, seed=seed)
        self.repeats = repeats

    def order(self) -> Iterator[tuple[int, int]]:
        """Yield (epoch, image); the repetition's number is in the upper bits of the epoch."""
        copies = (
            (epoch + repetition * PASSES, image)
            for epoch, image in super().order()
            for repetition in range(self.repeats)
        )
        return itertools.islice(copies, self.length)


class BalancedSampler(EpochSampler):
    """Class-balanced sampling: equally many images (or one more) of every class, at the usual epoch length.

    Images of a small class are repeated, each time with another augmentation and equally often (or once more); of a
    large class each epoch has a part, without repetition. The order depends only on seed and epoch.

    Args:
        labels: class of each image.
        seed: random seed of order and choice.
    """

    def __init__(self, labels: Sequence[int], seed: int) -> None:
        super().__init__(len(labels), shuffle=True, seed=seed)
        every = np.asarray(labels)
        self.images = [np.flatnonzero(every == label) for label in np.unique(every)]

    def order(self) -> Iterator[tuple[int, int]]:
        """Yield (epoch, image); the repetition's number is in the upper bits of the epoch."""
        random = np.random.default_rng(mix(self.seed, self.epoch, self.length, 1))
        share, over = divmod(self.length, len(self.images))
        # classes with one more image differ by epoch
        more = random.permutation(len(self.images)) < over
        drawn = []
        for images, extra in zip(self.images, more, strict=True):
            wanted = share + int(extra)
            for repetition in range(-(-wanted // len(images))):
                part = random.permutation(images)[: wanted - repetition * len(images)]
                drawn += [(self.epoch + repetition * PASSES, int(i)) for i in part]
        return (drawn[i] for i in random.permutation(len(drawn)))


def balanced_weights(samples: Sequence[Sample], classes: int) -> list[float]:
    """Return a weight for each class: images / (classes with images × images of the class), 0 without images.

    Their mean over the images is 1, which keeps the scale of the loss; scikit-learn calls this ``balanced``.
    """
    counts = np.bincount([sample.label for sample in samples], minlength=classes)
    present = counts > 0
    weights = np.divide(len(samples), present.sum() * counts, out=np.zeros(classes), where=present)
    return [float(weight) for weight in weights]


def mix(*values: int) -> int:
    """Hash integers to one of 64 bits (splitmix64), so that neighbouring seeds give unrelated streams."""
    state = 0
    for value in values:
        state = (state + (value & MASK) + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state
