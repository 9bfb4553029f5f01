"""Seeds for each image and epoch, in place of labels for images that have none."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vtk.data.audit.result import Sample
from vtk.data.loading.samplers import mix
from vtk.training.engine.streams import Stream, batches
from vtk.training.objectives.base import Batch

HELD_OUT = (1 << 63) - 1
"""Takes the place of the epoch for held-out images, whose masks never change."""


def number_images(samples: Sequence[Sample]) -> list[Sample]:
    """Return the images with their index as label."""
    return [Sample(sample.path, i) for i, sample in enumerate(samples)]


def seeds_of(numbers: Tensor, seed: int, epoch: int) -> Tensor:
    """Return a non-negative int64 seed for each of the images ``numbers`` (B,) in ``epoch``."""
    return torch.tensor([mix(seed, epoch, number) >> 1 for number in numbers.tolist()])


class SeededStream:
    """A stream whose labels are seeds instead of indices of images.

    Args:
        stream: of images labelled by `number_images`.
        seed: of the run.
    """

    def __init__(self, stream: Stream, seed: int) -> None:
        self._stream, self._seed = stream, seed

    @property
    def sizes(self) -> Sequence[int]:
        """Images in each batch of an epoch, all processes together."""
        return self._stream.sizes

    def epoch(self, index: int, skip: int = 0) -> Iterator[Batch]:
        """Yield this process's share of each batch of epoch ``index`` (from 0) but the first ``skip``."""
        for batch in batches(self._stream, index, skip):
            yield dataclasses.replace(batch, labels=seeds_of(batch.labels, self._seed, index))
