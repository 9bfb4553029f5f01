"""Classes of unequal size: draw each equally often, or let its images count for more in the loss."""

from collections.abc import Iterator, Sequence

import numpy as np

from vtk.data.loader import EpochSampler, mix
from vtk.data.repeated_augmentation import PASSES
from vtk.data.samples import Sample


class BalancedSampler(EpochSampler):
    """As many images an epoch as there are, of every class equally many (or one more).

    The images of a small class come again and again, each time with an augmentation of its own, before any comes once
    more than another; of a large class every epoch shows a part, and no image twice. All of it follows from the seed
    and the epoch.

    Args:
        labels: class of each image; a class without images gets none.
        seed: of the order and of the choice.
    """

    def __init__(self, labels: Sequence[int], seed: int) -> None:
        super().__init__(len(labels), shuffle=True, seed=seed)
        every = np.asarray(labels)
        self.images = [np.flatnonzero(every == label) for label in np.unique(every)]

    def order(self) -> Iterator[tuple[int, int]]:
        """Yield (epoch, image); the number of an image's repetition is in the upper bits of its epoch."""
        random = np.random.default_rng(mix(self.seed, self.epoch, self.length, 1))
        share, over = divmod(self.length, len(self.images))
        # the classes that get one image more are others in each epoch
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

    Their mean over the images is 1, so that the loss keeps its size; this is what scikit-learn calls ``balanced``.
    """
    counts = np.bincount([sample.label for sample in samples], minlength=classes)
    present = counts > 0
    weights = np.divide(len(samples), present.sum() * counts, out=np.zeros(classes), where=present)
    return [float(weight) for weight in weights]
