"""What a scan found: images with their labels, files that were skipped, and the audit that people read."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from vtk import console
from vtk.data.audit.copies import Copies
from vtk.data.audit.unusual import Odd
from vtk.data.decoding.images import MAX_PIXELS
from vtk.data.decoding.rules import SRGB, Decoding
from vtk.data.sources.unused_files import LeftOut
from vtk.text import one_line

_ROWS = 24
_BAD_SHOWN = 10


class Sample(NamedTuple):
    """An image file and the index of its class."""

    path: Path
    label: int


class BadFile(NamedTuple):
    """An image file that is skipped, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class DataAudit:
    """What a folder of images holds.

    Attributes:
        root: the folder as given.
        layout: ``split`` (the folder says what is held out) or ``flat`` (divided here, by ``val_split`` and ``seed``).
        classes: names in index order, naturally sorted.
        train: images to train on.
        val: held-out images.
        bad: files that were skipped.
        sizes: ``min|median|max_height|width`` of the good images after turning upright, in pixels.
        modes: Pillow mode → number of good images.
        exif_rotated: good images that EXIF turns or mirrors.
        notes: what else the user should know, one sentence each.
        warnings: what is probably not meant, one sentence each.
        odd: kinds of unusual images, with examples.
        val_split: fraction held out of a flat folder.
        seed: of that division.
        max_pixels: of the largest image that counted as good.
        seconds: wall time of the scan.
        cached: files known from an earlier scan.
        copies: what is there more than once.
        left: files that are not used, and why.
        digests: of the bytes of each good image, by its path (`vtk.data.probing.probe.content_digest`).
        decoding: how the images become 8-bit ones, with the value range of those that have more.
        values: what images of more than 8 bits hold (`vtk.data.value_range`); empty where there are none.
        colors: kind of embedded colour profile → number of images.
    """

    noun: ClassVar[tuple[str, str]] = ("class", "classes")

    root: Path
    layout: Literal["split", "flat"]
    classes: tuple[str, ...]
    train: tuple[Sample, ...]
    val: tuple[Sample, ...]
    bad: tuple[BadFile, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)
    exif_rotated: int = 0
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    odd: tuple[Odd, ...] = ()
    val_split: float = 0.2
    seed: int = 0
    max_pixels: int = MAX_PIXELS
    seconds: float = 0.0
    cached: int = 0
    copies: Copies = field(default_factory=Copies)
    left: LeftOut = field(default_factory=LeftOut)
    digests: Mapping[Path, str] = field(default_factory=dict, repr=False)
    decoding: Decoding = SRGB
    values: Mapping[str, Any] = field(default_factory=dict)
    colors: Mapping[str, int] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder that names of files start at: ``root``, or that of a table."""
        return self.root if self.root.is_dir() else self.root.parent

    def is_inside(self, path: Path) -> bool:
        """Tell whether a file lies in the folder, and if it is a link, what it leads to: only such are shown on pages.

        A table may name any file of this machine by its absolute path. Links to folders are followed.
        """
        if path.is_symlink():
            return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.folder))
        return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(self.folder))

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All good images, those to train on first."""
        return self.train + self.val

    @property
    def seen(self) -> int:
        """All files that the set holds: used, unreadable and left out."""
        return len(self.train) + len(self.val) + len(self.bad) + self.left.total

    def counts(self, part: Literal["train", "val"]) -> list[int]:
        """Return the number of images per class, in index order."""
        count = Counter(sample.label for sample in getattr(self, part))
        return [count[i] for i in range(len(self.classes))]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; the images themselves are counted, bad files listed."""
        return {
            "root": str(self.root),
            "layout": self.layout,
            "val_split": self.val_split,
            "seed": self.seed,
            "classes": list(self.classes),
            "train": {"count": len(self.train), "per_class": self.counts("train")},
            "val": {"count": len(self.val), "per_class": self.counts("val")},
            "bad": [{"path": str(bad.path), "reason": bad.reason} for bad in self.bad],
            "sizes": dict(self.sizes),
            "modes": dict(self.modes),
            "exif_rotated": self.exif_rotated,
            "values": dict(self.values),
            "colors": dict(self.colors),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "odd": [odd.to_dict() for odd in self.odd],
            "files": {
                "seen": self.seen,
                "used": len(self.samples),
                "bad": len(self.bad),
                "left_out": self.left.to_dict(),
            },
            "copies": self.copies.to_dict(),
            "seconds": self.seconds,
            "cached": self.cached,
        }

    def account(self) -> str:
        """Return one line that adds up all files: used, unreadable, and left out by reason."""
        again = sum(len(group) - 1 for group in self.copies.groups)
        used = f"used ({again:,} of them copies of others)" if again else "used"
        terms = {used: len(self.samples), "unreadable": len(self.bad), **self.left.reasons()}
        told = " + ".join(f"{count:,} {what}" for what, count in terms.items() if count)
        return f"files: {self.seen:,} = {told}"

    def print(self) -> None:
        """Print the audit for people."""
        train, val = self.counts("train"), self.counts("val")
        rows: list[tuple[object, ...]] = [(one_line(name), train[i], val[i]) for i, name in enumerate(self.classes)]
        if len(rows) > _ROWS:
            rows.sort(key=lambda row: -int(str(row[1])))
            half = _ROWS // 2
            rows = [*rows[:half], (f"… {len(rows) - 2 * half} more, by size …", "", ""), *rows[-half:]]
        rows.append((f"{len(self.classes)} {self.noun[1]}", len(self.train), len(self.val)))
        console.table(f"Images in {self.root}", (self.noun[0], "train", "held out"), rows)
        s = self.sizes
        if s:
            console.say(
                f"size (height×width): smallest {s['min_height']}×{s['min_width']}, median {s['median_height']}×"
                f"{s['median_width']}, largest {s['max_height']}×{s['max_width']} px; modes: "
                + ", ".join(f"{mode} {count}" for mode, count in self.modes.items())
                + (f"; {self.exif_rotated} turned upright by EXIF" if self.exif_rotated else "")
            )
        if self.seen > len(self.samples) or self.copies.groups:
            console.say(self.account())
        for note in self.notes:
            console.say(note)
        for warning in self.warnings:
            console.warn(warning)
        for bad in self.bad[:_BAD_SHOWN]:
            console.say(f"skipped {one_line(bad.path)}: {bad.reason}", style="yellow")
        if len(self.bad) > _BAD_SHOWN:
            console.say(f"… and {len(self.bad) - _BAD_SHOWN} more", style="yellow")
        if self.bad:
            console.say(f"{len(self.bad)} unreadable file{'s' * (len(self.bad) > 1)} skipped", style="yellow")
        console.say(f"scanned in {self.seconds:.1f} s ({self.cached} files known from an earlier scan)", style="dim")
