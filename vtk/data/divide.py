"""What is held out of a set that does not say it: a part of every class, and all copies of one image on one side."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from vtk.data.layout import split
from vtk.data.samples import Sample


def divide(
    samples: Sequence[Sample], digests: Mapping[Path, str], folder: Path, fraction: float, seed: int
) -> tuple[list[Sample], list[Sample]]:
    """Divide images class by class into (train, held out).

    A class without copies is divided by `vtk.data.layout.split`. Files of the same bytes come to one side, also where
    they lie in several classes: the smallest class decides.

    Args:
        samples: images, class by class; the order is kept.
        digests: of each one's bytes; what has none is unlike all others.
        folder: that the names which decide start at.
        fraction: to hold out, 0 ≤ fraction < 1.
        seed: chooses another division.

    Raises:
        UsageError: ``fraction`` is out of range.
    """
    prefix = len(folder.parts)
    by_class: dict[int, list[Sample]] = {}
    for sample in samples:
        by_class.setdefault(sample.label, []).append(sample)
    count = Counter(digests.get(sample.path, "") for sample in samples)
    sides: dict[str, bool] = {}  # digest of an image that there are copies of → whether it is held out
    divided: dict[int, tuple[list[Sample], list[Sample]]] = {}
    for label in sorted(by_class, key=lambda label: len(by_class[label])):
        mine = by_class[label]
        names = ["/".join(sample.path.parts[prefix:]) for sample in mine]
        marks = [mark if count[mark] > 1 else "" for mark in (digests.get(sample.path, "") for sample in mine)]
        if any(marks):
            divided[label] = _split_groups(mine, names, marks, fraction, seed, sides)
        else:
            divided[label] = split(mine, names, fraction, seed)
    train, val = ([sample for label in by_class for sample in divided[label][side]] for side in (0, 1))
    return train, val


def _split_groups(
    files: Sequence[Sample], names: Sequence[str], marks: Sequence[str], fraction: float, seed: int,
    sides: dict[str, bool],
) -> tuple[list[Sample], list[Sample]]:  # fmt: skip
    """Divide one class whose files of one mark stay together; ``sides`` says where marks are already, and learns."""
    groups: dict[str, list[int]] = {}
    for i, mark in sorted(enumerate(marks), key=lambda pair: names[pair[0]]):
        groups.setdefault(mark or f"\0{i}", []).append(i)
    wanted = min(max(int(len(files) * fraction + 0.5), 1), len(files) - 1) if fraction and len(groups) > 1 else 0
    held = {i for mark, group in groups.items() if sides.get(mark) for i in group}
    free = [mark for mark in groups if mark not in sides]
    key = {m: hashlib.sha256(f"{seed}:{names[groups[m][0]]}".encode("utf-8", "surrogateescape")).digest() for m in free}
    for mark in sorted(free, key=key.__getitem__):
        takes = len(held) + len(groups[mark]) <= wanted
        held.update(groups[mark] if takes else ())
        sides[mark] = takes
    if wanted and not held and free:  # every image has more copies than are to be held out: the fewest of one
        mark = min(free, key=lambda m: (len(groups[m]), key[m]))
        held.update(groups[mark])
        sides[mark] = True
    for mark in [m for m in sides if m.startswith("\0")]:
        del sides[mark]
    return [f for i, f in enumerate(files) if i not in held], [f for i, f in enumerate(files) if i in held]
