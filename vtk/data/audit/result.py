"""The result of a scan: samples, skipped files, and the audit with its printed form."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from vtk import console
from vtk.data.audit.copies import Copies
from vtk.data.audit.unusual import UnusualKind
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
    """A skipped image file, and the reason."""

    path: Path
    reason: str


@dataclass(frozen=True)
class DataAudit:
    """The audit of a set of images.

    Attributes:
        root: the folder as given.
        layout: ``split`` (the set has a held-out part) or ``flat`` (split here, by ``val_split`` and ``seed``).
        classes: names in index order, naturally sorted.
        train: images to train on.
        val: held-out images.
        bad: skipped files.
        sizes: ``min|median|max_height|width`` of the good images after turning upright, in pixels.
        modes: Pillow mode → number of good images.
        exif_rotated: number of good images that EXIF rotates or mirrors.
        notes: for the user, one sentence each.
        warnings: probable mistakes, one sentence each.
        odd: kinds of unusual images, with examples.
        val_split: fraction held out of a flat folder.
        train_share: fraction of the training images that is used, which ``train`` holds (``--train-share``).
        seed: random seed of the split.
        max_pixels: limit of an image's size (width × height).
        seconds: wall time of the scan.
        cached: number of files known from an earlier scan.
        copies: duplicates and near duplicates.
        left: unused files, by reason.
        digests: of the bytes of each good image, by its path (`vtk.data.probing.probe.content_digest`).
        decoding: rules of decoding, with the value range of images of more than 8 bits.
        values: facts of images of more than 8 bits (`vtk.data.value_range`); empty if there are none.
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
    odd: tuple[UnusualKind, ...] = ()
    val_split: float = 0.2
    train_share: float = 1.0
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
        """The folder that file names are relative to: ``root``, or the folder of a table."""
        return self.root if self.root.is_dir() else self.root.parent

    def is_inside(self, path: Path) -> bool:
        """Return whether a file, or the target of a link, is inside the folder: only such files are shown on pages.

        A table may name any file of this machine by its absolute path. Links to folders are followed.
        """
        if path.is_symlink():
            return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.folder))
        return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(self.folder))

    @property
    def samples(self) -> tuple[Sample, ...]:
        """All good images, training images first."""
        return self.train + self.val

    @property
    def seen(self) -> int:
        """Number of all files of the set: used, unreadable and unused."""
        return len(self.train) + len(self.val) + len(self.bad) + self.left.total

    def counts(self, part: Literal["train", "val"]) -> list[int]:
        """Return the number of images per class, in index order."""
        count = Counter(sample.label for sample in getattr(self, part))
        return [count[i] for i in range(len(self.classes))]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; images are counted, bad files listed."""
        return {
            "root": str(self.root),
            "layout": self.layout,
            "val_split": self.val_split,
            "train_share": self.train_share,
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
        """Return one line that accounts for all files: used, unreadable, and unused by reason."""
        again = sum(len(group) - 1 for group in self.copies.groups)
        used = f"used ({again:,} of them duplicates)" if again else "used"
        terms = {used: len(self.samples), "unreadable": len(self.bad), **self.left.reasons()}
        total = " + ".join(f"{count:,} {what}" for what, count in terms.items() if count)
        return f"files: {self.seen:,} = {total}"

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
                + (f"; {self.exif_rotated} rotated by EXIF" if self.exif_rotated else "")
            )
        if self.seen > len(self.samples) or self.copies.groups:
            console.say(self.account())
        self.print_remarks()
        console.say(f"scanned in {self.seconds:.1f} s ({self.cached} files from the cache)", style="dim")

    def print_remarks(self) -> None:
        """Print notes, warnings and skipped files."""
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
