"""Finds duplicate images: within a class, under several labels, and in both parts of the split."""

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
"""Most groups whose files are listed in JSON."""


class PlacedImage(NamedTuple):
    """A used image: its path below the folder (with ``/``), its class, and ``train`` or ``val``."""

    name: str
    of_class: str
    part: str


Group = tuple[PlacedImage, ...]
"""Files of one image."""


@dataclass(frozen=True)
class Copies:
    """Duplicates and near duplicates of a set.

    Attributes:
        groups: two or more byte-identical files each; groups in both parts first.
        near: the first `vtk.data.audit.unusual.SHOWN` pairs of near duplicates: first those across the parts (training
            image first), then those within one.
        leaked: number of held-out images that are byte-identical to training images.
        near_leaked: number of other held-out images with a near duplicate among training images.
        near_within: number of near-duplicate pairs within one part.
        links: number of files in groups that are hard or symbolic links to another.
        near_limit: most differing bits of near duplicates; negative: the images are too similar to find any.
    """

    groups: tuple[Group, ...] = ()
    near: tuple[tuple[PlacedImage, PlacedImage], ...] = ()
    leaked: int = 0
    near_leaked: int = 0
    near_within: int = 0
    links: int = 0
    near_limit: int = NEAR

    @property
    def leaks(self) -> tuple[Group, ...]:
        """Groups with files in both parts."""
        return tuple(group for group in self.groups if _both(group))

    @property
    def conflicts(self) -> tuple[Group, ...]:
        """Groups with several labels."""
        return tuple(group for group in self.groups if len({placed.of_class for placed in group}) > 1)

    @property
    def repeated(self) -> int:
        """Number of files that repeat another one of the same class and part."""
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
        """Return warnings, one sentence each."""
        found = []
        if self.leaked:
            found.append(f"{self._leak()}; this makes held-out metrics too good: keep one of each")
        if conflicts := self.conflicts:
            first = _two(conflicts[0], lambda a, b: a.of_class != b.of_class)
            found.append(
                f"{_count(len(conflicts), 'image has', 'images have')} byte-identical copies under other labels, for "
                f"example {first[0]} and {first[1]}; keep the right one"
            )
        if self.near_leaked:
            a, b = self.near[0]
            found.append(
                f"{_count(self.near_leaked, 'held-out image is', 'held-out images are')} near-duplicate to training "
                f"images, for example {one_line(b.name)} to {one_line(a.name)}; see `vtk data audit`"
            )
        return found

    def notes(self) -> list[str]:
        """Return further notes, one sentence each."""
        found = []
        if self.repeated:
            group = next(g for g in self.groups if len({placed[1:] for placed in g}) < len(g))
            first = _two(group, lambda a, b: a[1:] == b[1:])
            found.append(
                f"{_count(self.repeated, 'file is', 'files are')} byte-identical to another one of the same class and "
                f"part, and each counts as an image, for example {first[1]} is {first[0]}"
            )
        if self.links:
            found.append(
                f"{_count(self.links, 'of the identical files is', 'of the identical files are')} hard or symbolic "
                "links; a link counts where it is"
            )
        if self.near_within:
            a, b = next(pair for pair in self.near if pair[0].part == pair[1].part)
            found.append(
                f"{_count(self.near_within, 'pair', 'pairs')} of near duplicates within a part, for "
                f"example {one_line(a.name)} and {one_line(b.name)}"
            )
        if self.near_limit < 0:
            found.append("the images are too similar to each other (as digits or forms are) to find near duplicates")
        return found

    def refuse_leaks(self, root: Path) -> None:
        """Refuse a set with byte-identical images in both parts.

        Raises:
            DataError: there are such images; near duplicates are not refused.
        """
        if self.leaked:
            raise DataError(
                f"{root}: {self._leak()}, and --on-leak is fail; keep one of each (`vtk data audit` lists them)"
            )

    def _leak(self) -> str:
        group = self.leaks[0]
        train, val = (next(placed for placed in group if placed.part == part) for part in ("train", "val"))
        return (
            f"{_count(self.leaked, 'held-out image is', 'held-out images are')} byte-identical to training images, for "
            f"example {one_line(val.name)} is {one_line(train.name)}"
        )


def find_copies(root: Path, parts: Mapping[str, Sequence[tuple[str, str]]], probes: Mapping[str, Probe]) -> Copies:
    """Find the duplicates among all used images.

    Args:
        root: the folder that names start at.
        parts: ``train`` and ``val`` → names of their images, with the class of each.
        probes: of each name.
    """
    images = [*parts["train"], *parts["val"]]
    first_held = len(parts["train"])
    digests = [probes[name].digest for name, _ in images]
    counts = Counter(digests)
    repeated: dict[str, list[int]] = {}  # only of repeated digests: a list for each file would dominate the time
    for i, digest in enumerate(digests):
        if digest and counts[digest] > 1:
            repeated.setdefault(digest, []).append(i)
    groups = sorted(
        (tuple(_placed(images, i, first_held) for i in places) for places in repeated.values()),
        key=lambda group: not _both(group),
    )
    leaked = sum(placed.part == "val" for group in groups if _both(group) for placed in group)
    # one file per image is enough
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
            if one[0] < first_held <= other[0]:  # otherwise the held-out ones are exact leaks
                near_leaked.update(other)
                across.append((one[0], other[0]))
                break
        else:
            within.append((first[0], second[0]))
    near = [
        (_placed(images, i, first_held), _placed(images, j, first_held)) for i, j in [*across[:SHOWN], *within[:SHOWN]]
    ]
    return Copies(tuple(groups), tuple(near), leaked, len(near_leaked), len(within), _links(root, groups), limit)


def _placed(images: Sequence[tuple[str, str]], i: int, first_held: int) -> PlacedImage:
    return PlacedImage(*images[i], "train" if i < first_held else "val")


def _links(root: Path, groups: Sequence[Group]) -> int:
    """Return the number of files that are hard or symbolic links to another one of their group."""
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


def _two(group: Group, fit: Callable[[PlacedImage, PlacedImage], bool]) -> tuple[str, str]:
    """Return the names of the first two files of a group for which ``fit`` holds."""
    return next((one_line(a.name), one_line(b.name)) for i, a in enumerate(group) for b in group[i + 1 :] if fit(a, b))


def _count(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
