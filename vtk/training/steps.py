"""What one optimiser step is: its batches, and the rule that turns their gradients into an update."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from vtk.training.objective import Batch


class StepRule(Protocol):
    """How gradients become an update.

    Attributes:
        passes: how often a step asks for gradients of the same batches.
    """

    passes: int

    def step(self, gradients: Callable[[], Tensor], update: Callable[[], None]) -> Tensor:
        """Do one optimiser step.

        Args:
            gradients: clears the gradients, computes those of the step's batches and returns the mean loss.
            update: clips, lets the optimiser step and advances the learning rate; called once.

        Returns:
            The loss to log.
        """


class PlainStep:
    """Gradients, then update."""

    passes = 1

    def step(self, gradients: Callable[[], Tensor], update: Callable[[], None]) -> Tensor:
        """Do one optimiser step."""
        loss = gradients()
        update()
        return loss


class Feed:
    """The prepared batches of one step, fetched when first used and kept if they are used again."""

    def __init__(self, source: Iterator[Batch], count: int, prepare: Callable[[Batch], Batch], *, keep: bool) -> None:
        self.source, self.count, self.prepare, self.keep = source, count, prepare, keep
        self.kept: list[Batch] = []

    def __iter__(self) -> Iterator[Batch]:
        if self.kept:
            yield from self.kept
            return
        for _ in range(self.count):
            batch = self.prepare(next(self.source))
            if self.keep:
                self.kept.append(batch)
            yield batch


def plan_steps(sizes: Sequence[Sequence[int]], accumulate: int) -> list[tuple[int, list[int]]]:
    """Return (stream, batch sizes) of each optimiser step of an epoch; streams take turns evenly over the epoch."""
    steps = []
    for stream, batches in enumerate(sizes):
        groups = [list(batches[i : i + accumulate]) for i in range(0, len(batches), accumulate)]
        steps += [((i + 0.5) / len(groups), stream, group) for i, group in enumerate(groups)]
    steps.sort(key=lambda s: s[:2])
    return [(stream, group) for _, stream, group in steps]
