"""The same image several times: within a class, under two labels, and on both sides of the division."""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vtk.data.audit.near_duplicates import NEAR, near_limit, near_pairs
from vtk.data.audit.unusual import SHOWN
from vtk.data.probing.probe import Probe
from vtk.errors import DataError
from vtk.text import one_line

LISTED = 1000
"""Groups whose files are written down."""


class Placed(NamedTuple):
    """An image that is used: its path below the folder (with ``/``), its class, and ``train`` or ``val``."""

    name: str
    of_class: str
    part: str


Group = tuple[Placed, ...]
"""Files that show one image."""


@dataclass(frozen=True)
class Copies:
    """What is in a set more than once.

    Attributes:
        groups: files of the same bytes, two or more each; those on both sides of the division first.
        near: the first `vtk.data.audit.unusual.SHOWN` pairs of images that look alike but differ in their bytes, those
            between the parts (the training image first) before those within one.
        leaked: held-out images whose bytes are in the training part, too.
        near_leaked: other held-out images that look like a training image.
        near_within: pairs that look alike within one part.
        links: files of the groups that are another one by a hard or a symbolic link.
        near_limit: bits that images which look alike may differ in; below zero all look alike, and none is judged.
    """

    groups: tuple[Group, ...] = ()
    near: tuple[tuple[Placed, Placed], ...] = ()
    leaked: int = 0
    near_leaked: int = 0
    near_within: int = 0
    links: int = 0
    near_limit: int = NEAR

    @property
    def leaks(self) -> tuple[Group, ...]:
        """Groups that are on both sides of the division."""
        return tuple(group for group in self.groups if _both(group))

    @property
    def conflicts(self) -> tuple[Group, ...]:
        """Groups that have several labels."""
        return tuple(group for group in self.groups if len({placed.of_class for placed in group}) > 1)

    @property
    def repeated(self) -> int:
        """Files that another one of the same class and part repeats."""
        return sum(len(group) - len({placed[1:] for placed in group}) for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: numbers, and the files of the first `LISTED` groups."""
        return {
            "leaked": self.leaked,
            "conflicts": len(self.conflicts),
            "repeated": self.repeated,
            "near_leaked": self.near_leaked,
            "near_within": self.near_within,
            "links": self.links,
            "near_limit": self.near_limit,
            "groups": [[placed._asdict() for placed in group] for group in self.groups[:LISTED]],
            "near": [[placed._asdict() for placed in pair] for pair in self.near],
        }

    def warnings(self) -> list[str]:
        """Return what is probably not meant, one sentence each."""
        found = []
        if self.leaked:
            found.append(f"{self._leak()}; held-out numbers are too good by that: keep one of each")
        if conflicts := self.conflicts:
            first = _two(conflicts[0], lambda a, b: a.of_class != b.of_class)
            found.append(
                f"{_count(len(conflicts), 'image lies', 'images lie')} under several labels, byte for byte the same: "
                f"for example {first[0]} and {first[1]}; keep the right one"
            )
        if self.near_leaked:
            a, b = self.near[0]
            found.append(
                f"{_count(self.near_leaked, 'held-out image looks', 'held-out images look')} like a training image "
                f"(near duplicates): for example {one_line(b.name)} like {one_line(a.name)}; see `vtk data audit`"
            )
        return found

    def notes(self) -> list[str]:
        """Return what else the user should know, one sentence each."""
        found = []
        if self.repeated:
            group = next(g for g in self.groups if len({placed[1:] for placed in g}) < len(g))
            first = _two(group, lambda a, b: a[1:] == b[1:])
            found.append(
                f"{_count(self.repeated, 'file repeats', 'files repeat')} another one of the same class and part, byte "
                f"for byte, and counts again: for example {first[1]} is {first[0]}"
            )
        if self.links:
            found.append(
                f"{_count(self.links, 'of the equal files is', 'of the equal files are')} the same file by a hard or "
                "symbolic link; links count by their own place"
            )
        if self.near_within:
            a, b = next(pair for pair in self.near if pair[0].part == pair[1].part)
            found.append(
                f"{_count(self.near_within, 'pair', 'pairs')} of images within a part look alike (near duplicates): "
                f"for example {one_line(a.name)} and {one_line(b.name)}"
            )
        if self.near_limit < 0:
            found.append("the images are too alike, as digits or forms are, for near duplicates to be told among them")
        return found

    def refuse_leaks(self, root: Path) -> None:
        """Stop at images that are on both sides of the division.

        Raises:
            DataError: there are some; near duplicates do not count.
        """
        if self.leaked:
            raise DataError(
                f"{root}: {self._leak()}, and --on-leak is fail; keep one of each; `vtk data audit` shows them"
            )

    def _leak(self) -> str:
        group = self.leaks[0]
        train, val = (next(placed for placed in group if placed.part == part) for part in ("train", "val"))
        return (
            f"{_count(self.leaked, 'held-out image is', 'held-out images are')} in the training part, too, byte for "
            f"byte: for example {one_line(val.name)} is {one_line(train.name)}"
        )


def find_copies(root: Path, parts: Mapping[str, Sequence[tuple[str, str]]], probes: Mapping[str, Probe]) -> Copies:
    """Compare all images that are used.

    Args:
        root: the folder that names start at.
        parts: ``train`` and ``val`` → names of their images, with the class of each.
        probes: of each name.
    """
    images = [*parts["train"], *parts["val"]]
    first_held = len(parts["train"])
    digests = [probes[name].digest for name, _ in images]
    counts = Counter(digests)
    repeated: dict[str, list[int]] = {}  # few containers: of many files, collecting them would take longest
    for i, digest in enumerate(digests):
        if digest and counts[digest] > 1:
            repeated.setdefault(digest, []).append(i)
    groups = sorted(
        (tuple(_placed(images, i, first_held) for i in places) for places in repeated.values()),
        key=lambda group: not _both(group),
    )
    leaked = sum(placed.part == "val" for group in groups if _both(group) for placed in group)
    # one file of each image is enough
    looks = [(i, look) for i, (name, _) in enumerate(images) if (look := probes[name].looks)]
    looks = [(i, look) for i, look in looks if digests[i] not in repeated or repeated[digests[i]][0] == i]
    across: list[tuple[int, int]] = []
    within: list[tuple[int, int]] = []
    near_leaked: set[int] = set()
    prints = [look for _, look in looks]
    limit = near_limit(prints)
    for a, b in near_pairs(prints, limit):
        first, second = (repeated.get(digests[looks[k][0]], [looks[k][0]]) for k in (a, b))
        for one, other in ((first, second), (second, first)):
            if one[0] < first_held <= other[0]:  # else those held out are leaks byte for byte
                near_leaked.update(other)
                across.append((one[0], other[0]))
                break
        else:
            within.append((first[0], second[0]))
    near = [
        (_placed(images, i, first_held), _placed(images, j, first_held)) for i, j in [*across[:SHOWN], *within[:SHOWN]]
    ]
    return Copies(tuple(groups), tuple(near), leaked, len(near_leaked), len(within), _links(root, groups), limit)


def _placed(images: Sequence[tuple[str, str]], i: int, first_held: int) -> Placed:
    return Placed(*images[i], "train" if i < first_held else "val")


def _links(root: Path, groups: Sequence[Group]) -> int:
    """Count the files that are another one of their group, by a hard or a symbolic link."""
    count = 0
    for group in groups:
        known: set[tuple[int, int]] = set()
        for placed in group:
            with contextlib.suppress(OSError):  # deleted since
                info = os.stat(root / placed.name)
                known.add((info.st_dev, info.st_ino))
        count += len(group) - len(known) if known else 0
    return count


def _both(group: Group) -> bool:
    return len({placed.part for placed in group}) > 1


def _two(group: Group, fit: Callable[[Placed, Placed], bool]) -> tuple[str, str]:
    """Return the names of the first two files of a group that fit."""
    return next((one_line(a.name), one_line(b.name)) for i, a in enumerate(group) for b in group[i + 1 :] if fit(a, b))


def _count(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
