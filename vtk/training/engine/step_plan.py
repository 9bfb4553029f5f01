"""Plans optimizer steps: the batches of each stream, and the forward passes they go through."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vtk.data.loading.samplers import mix
from vtk.training.objectives.base import Batch


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


Step = tuple[tuple[int, list[int]], ...]
"""One optimizer step: (stream, sizes of its batches) for each stream that takes part."""


def count_images(step: Step) -> int:
    """Return the number of images of a step."""
    return sum(sum(sizes) for _, sizes in step)


def count_batches(steps: Sequence[Step], streams: int) -> list[int]:
    """Return the number of batches of each stream in ``steps``."""
    counts = [0] * streams
    for step in steps:
        for stream, sizes in step:
            counts[stream] += len(sizes)
    return counts


@dataclass
class Part:
    """The batches of one forward pass of a step: one of every stream that has one left.

    Attributes:
        batches: of streams in ascending order; a rule may put others in their place.
        last: whether it is the last of the step.
        random: states of the generators before its first forward pass; None before it.
    """

    batches: list[Batch]
    last: bool
    random: tuple[Tensor, ...] | None = None

    def play(self, device: torch.device) -> None:
        """Restore the random states of the first forward pass; call it before each pass."""
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index or 0])
        if self.random is None:
            self.random = tuple(generator.get_state() for generator in generators)
        else:
            for generator, state in zip(generators, self.random, strict=True):
                generator.set_state(state)


class Feed:
    """The prepared parts of one step, fetched when first used and kept if they are used again.

    Args:
        parts: (number of a stream, its batches, how many of them) for each stream that takes part.
        prepare: is applied to each batch once.
        keep: whether the batches are used more than once.
    """

    def __init__(
        self, parts: Sequence[tuple[int, Iterator[Batch], int]], prepare: Callable[[Batch], Batch], *, keep: bool
    ) -> None:
        self.parts, self.prepare, self.keep = parts, prepare, keep
        self.kept: list[Part] = []

    def __iter__(self) -> Iterator[Part]:
        """Yield the parts in order."""
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
            one = Part(batches, i + 1 == passes)
            if self.keep:
                self.kept.append(one)
            yield one


def plan_steps(sizes: Sequence[Sequence[int]], accumulate: int) -> list[tuple[int, list[int]]]:
    """Return (stream, batch sizes) of each optimizer step of an epoch; streams take turns evenly over the epoch."""
    steps = []
    for stream, batches in enumerate(sizes):
        groups = _groups(batches, accumulate)
        steps += [((i + 0.5) / len(groups), stream, group) for i, group in enumerate(groups)]
    steps.sort(key=lambda s: s[:2])
    return [(stream, group) for _, stream, group in steps]


class EpochSteps:
    """The optimizer steps of every epoch of a run.

    Args:
        sizes: of the batches of each stream, of all processes.
        accumulate: batches in a step.
        seed: of the steps that several tasks share.
        joint: whether a step has batches of several streams, each for a learner of its own.
        epochs: at most.
        max_steps: of the run; None for all of its epochs.

    Attributes:
        count: steps of a whole epoch.
        epochs: that the run begins.
    """

    def __init__(
        self, sizes: Sequence[Sequence[int]], accumulate: int, seed: int, *, joint: bool, epochs: int,
        max_steps: int | None,
    ) -> None:  # fmt: skip
        self.sizes, self.accumulate, self.seed, self.joint, self.max_steps = sizes, accumulate, seed, joint, max_steps
        self.count = len(self._whole(0))
        self._most = epochs
        self.epochs = planned_epochs(epochs, self.count, max_steps) if self.count else epochs

    def of_epoch(self, epoch: int) -> list[Step]:
        """Return the steps of an epoch from 0, the last of which may be cut off by the most steps of the run."""
        steps = self._whole(epoch)
        return steps if self.max_steps is None else steps[: max(0, self.max_steps - epoch * self.count)]

    def of_learner(self, stream: int) -> int:
        """Return the number of steps of the run that the learner of a stream takes part in."""
        if not self.joint:
            total = self._most * self.count
            return total if self.max_steps is None else min(total, self.max_steps)
        # without a limit every epoch has as many, at other places
        first = self._whole(0)
        plans = (first if self.max_steps is None else self.of_epoch(epoch) for epoch in range(self.epochs))
        return sum(any(i == stream for i, _ in step) for steps in plans for step in steps)

    def total(self) -> int:
        """Return the number of steps of the run."""
        return sum(len(self.of_epoch(epoch)) for epoch in range(self.epochs))

    def _whole(self, epoch: int) -> list[Step]:
        if self.joint:
            return plan_joint(self.sizes, self.accumulate, mix(self.seed, epoch))
        return [((stream, sizes),) for stream, sizes in plan_steps(self.sizes, self.accumulate)]


def planned_epochs(epochs: int, steps: int, max_steps: int | None) -> int:
    """Return the number of epochs that a run begins: at most ``epochs``, and those of ``max_steps`` steps."""
    return epochs if max_steps is None else min(epochs, -(-max_steps // steps))


def plan_joint(sizes: Sequence[Sequence[int]], accumulate: int, seed: int) -> list[Step]:
    """Return the optimizer steps of an epoch that several streams share: each has every stream that is drawn for it.

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


def cut(parts: Iterable[Part], most: int | None) -> list[list[Part]]:
    """Return the parts of a step in groups of at most ``most`` images of each stream.

    Parts that fit into a group go through the model as they are. A part with more images is cut into as few pieces as
    that takes, as equal as possible, which are groups by themselves.

    Args:
        parts: of the step.
        most: None for one group.
    """
    if most is None:
        return [list(parts)]
    groups: list[list[Part]] = []
    held: Counter[int] = Counter()  # images of the last group, by stream
    for part in parts:
        sizes = Counter({batch.stream: len(batch.images) for batch in part.batches})
        if groups and all(held[stream] + size <= most for stream, size in sizes.items()):
            groups[-1].append(part)
            held += sizes
        else:
            groups += [[piece] for piece in _pieces(part, most)]
            held = sizes
    return groups


def _pieces(part: Part, most: int) -> list[Part]:
    counts = [-(-len(batch.images) // most) for batch in part.batches]
    if max(counts) == 1:
        return [part]
    pieces: list[list[Batch]] = [[] for _ in range(max(counts))]
    for batch, count in zip(part.batches, counts, strict=True):
        names = [f.name for f in dataclasses.fields(batch) if isinstance(getattr(batch, f.name), Tensor)]
        tensors = {name: getattr(batch, name).tensor_split(count) for name in names}
        for i in range(count):
            pieces[i].append(dataclasses.replace(batch, **{name: tensors[name][i] for name in names}))
    return [Part(batches, part.last and i + 1 == len(pieces)) for i, batches in enumerate(pieces)]
