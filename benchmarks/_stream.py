"""A stream for benchmarks of steps: loading images must not be in what is timed."""

from collections.abc import Iterator

from vtk.training.objectives.base import Batch


class Same:
    """A stream that gives one batch again and again."""

    def __init__(self, batch: Batch, steps: int) -> None:
        self.batch, self.sizes = batch, [len(batch.images)] * steps

    def epoch(self, index: int) -> Iterator[Batch]:
        for _ in self.sizes:
            yield self.batch
