"""Sets of images to run on: generated digits, which need nothing, or a folder of photographs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DIGITS = "cluttered digits"


@dataclass(frozen=True)
class ImageSet:
    """Images of one kind, under the name that results give them.

    Attributes:
        name: in the results.
        source: folder with ``train/`` and ``val/`` of class folders; None for digits made here.
        train: images to train on, at most.
        val: images held out, at most.
    """

    name: str
    source: Path | None
    train: int
    val: int

    @property
    def kind(self) -> Literal["digits", "photographs"]:
        """Which settings of an experiment they take."""
        return "digits" if self.source is None else "photographs"

    @property
    def hflip(self) -> float:
        """Probability of mirroring a training image; a mirrored digit is no digit."""
        return 0.0 if self.source is None else 0.5

    @property
    def word(self) -> str:
        """What `parse` makes them of."""
        return "digits" if self.source is None else f"{self.name}={self.source}"

    def folder(self, work: Path) -> Path:
        """Return where they lie, prepared, in the folder for runs."""
        return work / "images" / self.name.replace(" ", "-").replace(",", "").replace("/", "-").lower()

    def describe(self) -> dict[str, object]:
        """Return what numbers depend on besides settings and seed."""
        return {"name": self.name, "train": self.train, "val": self.val, "hflip": self.hflip}


def parse(word: str, train: int, val: int) -> ImageSet:
    """Return the images of ``digits``, ``FOLDER`` or ``NAME=FOLDER``.

    Raises:
        ValueError: the folder has no ``train`` and ``val``.
    """
    if word == "digits":
        return ImageSet(DIGITS, None, train, val)
    name, equals, folder = word.partition("=")
    named = bool(equals) and not Path(word).is_dir()
    source = Path(folder if named else word).resolve()
    if not ((source / "train").is_dir() and (source / "val").is_dir()):
        raise ValueError(f"{word}: give digits, FOLDER or NAME=FOLDER of a folder with train/ and val/")
    return ImageSet(name if named and name else source.name, source, train, val)
