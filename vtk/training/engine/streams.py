"""Streams of training batches: the same batches for the same epoch, divided among the processes."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import DataLoader, Sampler

from vtk.data.audit.folder_scan import Sample
from vtk.data.decoding.images import MAX_PIXELS
from vtk.data.loading.loader import Transform, make_loader, set_epoch
from vtk.data.loading.samplers import EpochSampler
from vtk.errors import UsageError
from vtk.training.engine.processes import Ranks
from vtk.training.objectives.base import Batch


class Stream(Protocol):
    """A source of training batches."""

    @property
    def sizes(self) -> Sequence[int]:
        """Images in each batch of an epoch, all processes together."""

    def epoch(self, index: int, skip: int = 0) -> Iterator[Batch]:
        """Yield this process's share of each batch of epoch ``index`` (from 0) but the first ``skip``."""


def batches(stream: Stream, index: int, skip: int = 0) -> Iterator[Batch]:
    """Return what a stream yields of an epoch but the first ``skip`` batches.

    A stream of one's own needs to know of ``skip`` only where a run goes on in the middle of an epoch.
    """
    return stream.epoch(index, skip) if skip else stream.epoch(index)


class ImageStream:
    """Shuffled, augmented images.

    With several processes, process r takes images r, r + W, r + 2W… of each batch, so the images of an optimizer step
    and their augmentation do not depend on the number of processes. A last batch with fewer images than processes is
    left out.

    Args:
        samples: files and labels.
        transform: image to (C, H, W) tensor.
        batch_size: images per batch, all processes together.
        seed: of order and augmentation.
        workers: processes that load images, for each training process.
        ranks: this process and the others.
        max_pixels: a larger image is an error.
        sampler: of the images, in place of a shuffled pass over all of them.

    Raises:
        UsageError: the batch size is below the number of processes.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        transform: Transform,
        *,
        batch_size: int,
        seed: int,
        workers: int,
        ranks: Ranks,
        max_pixels: int = MAX_PIXELS,
        sampler: EpochSampler | None = None,
    ) -> None:
        if batch_size % ranks.world:
            raise UsageError(
                f"`--batch-size` {batch_size} is shared by {ranks.world} processes; give a multiple of {ranks.world}"
            )
        loader = make_loader(
            samples, transform, batch_size=batch_size, shuffle=True, seed=seed, workers=workers, drop_last=False,
            max_pixels=max_pixels, sampler=sampler,
        )  # fmt: skip
        full, rest = divmod(len(samples), batch_size)
        self._sizes = [batch_size] * full + ([rest] if rest >= ranks.world else [])
        self._loader = share(loader, ranks) if ranks.world > 1 else loader

    @property
    def sizes(self) -> Sequence[int]:
        """Images in each batch of an epoch, all processes together."""
        return self._sizes

    def epoch(self, index: int, skip: int = 0) -> Iterator[Batch]:
        """Yield this process's share of each batch of epoch ``index`` (from 0) but the first ``skip``, unread."""
        set_epoch(self._loader, index, sum(self._sizes[:skip]))
        for (images, labels), _ in zip(self._loader, self._sizes[skip:], strict=False):
            yield Batch(images, labels)


class SampledStream:
    """A stream whose epochs hold a given number of batches: several passes over few images, or a part of one over many.

    Every epoch begins with a pass of its own; a pass's last batch, where it is not full, is left out.

    Args:
        stream: of one pass over the images.
        batches: in an epoch.
    """

    def __init__(self, stream: Stream, batches: int) -> None:
        sizes = stream.sizes
        self._stream, self._each = stream, sum(size == sizes[0] for size in sizes)
        self._sizes = [sizes[0]] * batches

    @property
    def sizes(self) -> Sequence[int]:
        """Images in each batch of an epoch, all processes together."""
        return self._sizes

    def epoch(self, index: int, skip: int = 0) -> Iterator[Batch]:
        """Yield this process's share of each batch of epoch ``index`` (from 0) but the first ``skip``."""
        left = len(self._sizes)
        first = index * -(-left // self._each)
        for number in itertools.count(first):
            count = min(left, self._each)
            if skip < count:
                yield from itertools.islice(batches(self._stream, number, skip), count - skip)
            skip = max(0, skip - count)
            left -= self._each
            if left <= 0:
                return


def batch_counts(sizes: Sequence[Sequence[int]], temperature: float) -> list[int | None]:
    """Return how many batches each stream has in an epoch where it is drawn with probability ∝ images^(1/temperature).

    All of them together are as many as the streams have; each has one at least. None leaves a stream as it is, which is
    what temperature 1 does.
    """
    if temperature == 1:
        return [None] * len(sizes)
    weights = [sum(batches) ** (1 / temperature) for batches in sizes]
    total = sum(map(len, sizes))
    return [max(1, round(total * weight / sum(weights))) for weight in weights]


class _Share(Sampler[list[Any]]):
    """This process's images of each batch, or every W-th whole batch."""

    def __init__(self, batch_sampler: Any, ranks: Ranks, whole: bool) -> None:
        self.batch_sampler, self.rank, self.world, self.whole = batch_sampler, ranks.rank, ranks.world, whole

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[list[Any]]:
        for i, batch in enumerate(self.batch_sampler):
            if self.whole and i % self.world == self.rank:
                yield batch
            elif not self.whole and len(batch) >= self.world:
                yield batch[self.rank :: self.world]


def share(loader: DataLoader[Any], ranks: Ranks, *, whole: bool = False) -> DataLoader[Any]:
    """Return a loader of this process's images of every batch or, with ``whole``, of every W-th batch as it is."""
    return DataLoader(
        loader.dataset,
        batch_sampler=_Share(loader.batch_sampler, ranks, whole),
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        persistent_workers=loader.persistent_workers,
        pin_memory=loader.pin_memory,
        generator=loader.generator,
    )
