"""What one optimiser step is: its batches, and the rule that turns their gradients into an update."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vtk.training.objective import Batch


@contextlib.contextmanager
def single_images(model: nn.Module, batches: Sequence[Batch]) -> Iterator[None]:
    """Let BatchNorms use their running statistics, inside of the context, where a batch holds a single image.

    One image has no spread: torch refuses to train on it, and a last batch of one is nothing a user chose.
    """
    norms = []
    if any(len(batch.images) == 1 for batch in batches):
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True


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


Step = tuple[tuple[int, list[int]], ...]
"""One optimiser step: (stream, sizes of its batches) for each stream that takes part."""


class Feed:
    """The prepared batches of one step, pass by pass, fetched when first used and kept if they are used again.

    Args:
        parts: (number of a stream, its batches, how many of them) for each stream that takes part. Each pass holds one
            batch of every stream that has one left.
        prepare: is applied to each batch once.
        keep: whether the batches are asked for again.
    """

    def __init__(
        self, parts: Sequence[tuple[int, Iterator[Batch], int]], prepare: Callable[[Batch], Batch], *, keep: bool
    ) -> None:
        self.parts, self.prepare, self.keep = parts, prepare, keep
        self.kept: list[tuple[list[Batch], bool]] = []

    def __iter__(self) -> Iterator[tuple[list[Batch], bool]]:
        """Yield the batches of each pass, and whether it is the last."""
        if self.kept:
            yield from self.kept
            return
        passes = max(count for _, _, count in self.parts)
        for i in range(passes):
            batches = [
                self.prepare(dataclasses.replace(next(source), stream=stream))
                for stream, source, count in self.parts
                if i < count
            ]
            one = batches, i + 1 == passes
            if self.keep:
                self.kept.append(one)
            yield one


def plan_steps(sizes: Sequence[Sequence[int]], accumulate: int) -> list[tuple[int, list[int]]]:
    """Return (stream, batch sizes) of each optimiser step of an epoch; streams take turns evenly over the epoch."""
    steps = []
    for stream, batches in enumerate(sizes):
        groups = _groups(batches, accumulate)
        steps += [((i + 0.5) / len(groups), stream, group) for i, group in enumerate(groups)]
    steps.sort(key=lambda s: s[:2])
    return [(stream, group) for _, stream, group in steps]


def plan_joint(sizes: Sequence[Sequence[int]], accumulate: int, seed: int) -> list[Step]:
    """Return the optimiser steps of an epoch that several streams share: each has every stream that is drawn for it.

    There are as many steps as the longest stream has groups of ``accumulate`` batches. A shorter stream is drawn for as
    many of them as it has groups, one in each of equal stretches of the epoch, where the seed says. It says the same to
    all processes.
    """
    streams = [_groups(batches, accumulate) for batches in sizes]
    total = max(map(len, streams), default=0)
    steps: list[list[tuple[int, list[int]]]] = [[] for _ in range(total)]
    for stream, groups in enumerate(streams):
        random = np.random.default_rng([seed, stream])
        for i, group in enumerate(groups):
            first, end = i * total // len(groups), (i + 1) * total // len(groups)
            steps[int(random.integers(first, end))].append((stream, group))
    return [tuple(step) for step in steps if step]


def _groups(batches: Sequence[int], accumulate: int) -> list[list[int]]:
    return [list(batches[i : i + accumulate]) for i in range(0, len(batches), accumulate)]
