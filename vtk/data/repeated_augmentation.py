"""Repeated augmentation: an image comes several times in a batch, each time augmented anew."""

import itertools
from collections.abc import Iterator

from vtk.data.loader import EpochSampler

PASSES = 1 << 32
"""How far apart the augmentation seeds of an image's repetitions are; no run has as many epochs."""


class RepeatSampler(EpochSampler):
    """As many images an epoch as there are, but an image comes ``repeats`` times in a row (Hoffer et al. 2020).

    The order is that of timm's ``RepeatAugSampler`` over all its processes: copies lie side by side in a batch, so that
    each of several processes, which take every W-th image, augments another copy. timm rounds the images of an epoch
    down to a multiple of 256; here all are counted, and the last image may come fewer times. All of it follows from
    the seed and the epoch.

    Args:
        length: number of images.
        repeats: of each that comes; an epoch shows about length / repeats of them.
        seed: of the order and the augmentation.
    """

    def __init__(self, length: int, repeats: int, seed: int) -> None:
        super().__init__(length, shuffle=True, seed=seed)
        self.repeats = repeats

    def order(self) -> Iterator[tuple[int, int]]:
        """Yield (epoch, image); the number of an image's repetition is in the upper bits of its epoch."""
        copies = (
            (epoch + repetition * PASSES, image)
            for epoch, image in super().order()
            for repetition in range(self.repeats)
        )
        return itertools.islice(copies, self.length)
