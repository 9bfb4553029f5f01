"""Splits a set into training and held-out part, stratified by class, with all copies of an image in one part."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from vtk.data.probing.probe import Probe
from vtk.errors import UsageError

T = TypeVar("T")

Named = tuple[str, int]
"""An image: its name below the folder, and the index of its class."""


def split(files: Sequence[T], names: Sequence[str], fraction: float, seed: int) -> tuple[list[T], list[T]]:
    """Divide one class into (train, held out).

    The files with the smallest hashes of (seed, name) are held out: the same ones on every machine and in any order,
    and adding a file moves few others. A class with two or more files has at least one in each part.

    Args:
        files: what to divide.
        names: for each file its path below the folder of class folders, with ``/``.
        fraction: to hold out, 0 ≤ fraction < 1.
        seed: chooses another division.

    Raises:
        UsageError: ``fraction`` is out of range.
    """
    if not 0 <= fraction < 1:
        raise UsageError(f"the held-out fraction is {fraction}; give 0 (none) or more, below 1")
    count = min(max(int(len(files) * fraction + 0.5), 1), len(files) - 1) if fraction and len(files) > 1 else 0
    keys = [hashlib.sha256(f"{seed}:{name}".encode("utf-8", "surrogateescape")).digest() for name in names]
    held_out = set(sorted(range(len(files)), key=keys.__getitem__)[:count])
    train = [file for i, file in enumerate(files) if i not in held_out]
    return train, [file for i, file in enumerate(files) if i in held_out]


def divide(
    images: Sequence[Named],
    probes: Mapping[str, Probe],
    prefix: str,
    fraction: float,
    seed: int,
    *,
    together: bool = True,
) -> tuple[list[Named], list[Named]]:
    """Divide images class by class into (train, held out).

    A class without copies is divided by `split`. Files of the same bytes come to one side, also where
    they lie in several classes: the smallest class decides.

    Args:
        images: class by class; the order is kept.
        probes: of each name; what has no digest is unlike all others.
        prefix: of the names, which does not count.
        fraction: to hold out, 0 ≤ fraction < 1.
        seed: chooses another division.
        together: whether copies of one image stay on one side.

    Raises:
        UsageError: ``fraction`` is out of range.
    """
    by_class: dict[int, list[Named]] = {}
    for image in images:
        by_class.setdefault(image[1], []).append(image)
    count = Counter(probes[name].digest for name, _ in images) if together else Counter[str]()
    copies = len(count) < len(images) and together
    sides: dict[str, bool] = {}  # digest of an image that there are copies of → whether it is held out
    divided: dict[int, tuple[list[Named], list[Named]]] = {}
    for label in sorted(by_class, key=lambda label: len(by_class[label])):
        mine = by_class[label]
        keys = [name.removeprefix(prefix) for name, _ in mine]
        digests = [probes[name].digest for name, _ in mine] if copies else []
        marks = [digest if count[digest] > 1 else "" for digest in digests]
        if any(marks):
            divided[label] = _split_groups(mine, keys, marks, fraction, seed, sides)
        else:
            divided[label] = split(mine, keys, fraction, seed)
    train, val = ([image for label in by_class for image in divided[label][side]] for side in (0, 1))
    return train, val


def _split_groups(
    files: Sequence[Named], names: Sequence[str], marks: Sequence[str], fraction: float, seed: int,
    sides: dict[str, bool],
) -> tuple[list[Named], list[Named]]:  # fmt: skip
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
