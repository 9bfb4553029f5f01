"""Divides held-out images into two halves: one chooses the ranks, the other judges what was chosen."""

from collections.abc import Hashable, Sequence

import numpy as np

Labels = Sequence[frozenset[int]]


def label_sets(labels: Sequence[object]) -> list[frozenset[int]]:
    """Return the classes of each image: of a class index one, of a row of zeros and ones those that are set."""
    return [
        frozenset(map(int, np.flatnonzero(label))) if isinstance(label, np.ndarray) else frozenset({int(label)})  # type: ignore[call-overload]
        for label in labels
    ]


def halve(labels: Labels, same: Sequence[Hashable], seed: int) -> tuple[list[int], list[int]]:
    """Return the places of the images of each half, in order.

    Every class is divided as evenly as its number of images allows, the rarest first (iterative stratification,
    Sechidis et al., 2011). Images that share a key in ``same`` stay together: a copy in the other half would let the
    choice see what judges it.

    Args:
        labels: classes of each image.
        same: a key for each image, such as the digest of its file.
        seed: decides between equal places.
    """
    groups: dict[Hashable, list[int]] = {}
    for place, key in enumerate(same):
        groups.setdefault(key, []).append(place)
    members = list(groups.values())
    classes = [frozenset().union(*(labels[i] for i in group)) for group in members]
    random = np.random.default_rng(seed)
    order = [int(i) for i in random.permutation(len(members))]
    waiting: dict[int, list[int]] = {}
    for i in order:
        for label in classes[i]:
            waiting.setdefault(label, []).append(i)
    counts = np.zeros(2, dtype=np.int64)
    held: dict[int, np.ndarray] = {label: np.zeros(2, dtype=np.int64) for label in waiting}
    side = np.full(len(members), -1)

    def assign(i: int, label: int | None) -> None:
        # the half that has fewer of this class, else fewer images in all; the first one where both are equal
        lead = 0 if label is None else int(held[label][0] - held[label][1])
        lead = lead or int(counts[0] - counts[1])
        half = int(lead > 0)
        side[i] = half
        counts[half] += len(members[i])
        for other in classes[i]:
            held[other][half] += len(members[i])

    while waiting:
        left = {label: [i for i in found if side[i] < 0] for label, found in waiting.items()}
        waiting = {label: found for label, found in left.items() if found}
        if waiting:
            rarest = min(waiting, key=lambda label: (len(waiting[label]), label))
            for i in waiting.pop(rarest):
                assign(i, rarest)
    for i in order:
        if side[i] < 0:
            assign(i, None)
    halves = [sorted(place for i in np.flatnonzero(side == half) for place in members[i]) for half in (0, 1)]
    return halves[0], halves[1]
