"""The images of ``--data``: held-out images verify an exported model, training images calibrate it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from vtk import console
from vtk.card import Card
from vtk.data.probing.probe import content_digest
from vtk.errors import DataError, UsageError
from vtk.models.devices import FP8
from vtk.runtime.data_parts import Split
from vtk.runtime.images import ImageSelection, choose_images
from vtk.runtime.source import Source


@dataclass(frozen=True)
class DataImages:
    """Images of a folder for one model.

    Attributes:
        judging: held-out images, or the part that ``--split`` names.
        data: the folder.
        card: of the model.
        split: ``--split``; None without it.
        described: whether the card's classes have names.
    """

    judging: ImageSelection
    data: Path
    card: Card = field(repr=False)
    split: Split | None
    described: bool

    @cached_property
    def calibration(self) -> tuple[ImageSelection, ImageSelection]:
        """Images to calibrate on, and images to verify the calibrated file with.

        These are the training images and the held-out ones. If both would be the same images, each gets every second
        one.
        """
        found = self.judging
        if self.split is None and len(self.judging.paths) > 1:
            try:
                found = choose_images(self.card, self.data, "train", described=self.described)
            except DataError:
                console.say(f"{self.data} has no training images: every second held-out image calibrates")
        if set(found.paths).isdisjoint(self.judging.paths):
            return found, _without_copies(self.judging, found)
        halves = [_every_second(self.judging, first) for first in (1, 0)]
        return halves[0], _without_copies(halves[1], halves[0])

    @cached_property
    def choice(self) -> tuple[ImageSelection, ImageSelection]:
        """Images to choose by what of a calibrated file is kept in higher precision, and images to verify it with.

        Each gets every second one of those that `calibration` has for the second.
        """
        judged = self.calibration[1]
        halves = [_every_second(judged, first) for first in (0, 1)]
        return halves[0], _without_copies(halves[1], halves[0])


def data_images(
    card: Card, data: Path | None, split: Split | None = None, *, described: bool = True
) -> DataImages | None:
    """Return the images of ``--data`` for a model, and print which; None without ``--data``.

    Raises:
        DataError: the folder has no image of that part.
    """
    if data is None:
        return None
    return DataImages(choose_images(card, data, split or "val", described=described), data, card, split, described)


def fp8_images(source: Source, precision: str, data: Path | None) -> dict[str, DataImages | None]:
    """Return the extra arguments of `load_backend` for a precision: for fp8, the images."""
    if precision != FP8:
        return {}
    return {"given": data_images(source.card, data, described=source.described)}


def judging_images(given: DataImages | None) -> ImageSelection | None:
    """Return the images to verify with; None without ``--data``."""
    return None if given is None else given.judging


def _every_second(chosen: ImageSelection, first: int) -> ImageSelection:
    paths = chosen.paths[first::2] or chosen.paths  # of one image, both halves are that one
    labels = None if chosen.labels is None else (chosen.labels[first::2] or chosen.labels)
    return ImageSelection(paths, labels, f"{chosen.what}, every second one")


def _without_copies(chosen: ImageSelection, others: ImageSelection) -> ImageSelection:
    """Remove images of which ``others`` has a copy, unless none would be left."""
    seen = {digest for path in others.paths if (digest := _digest(path))}
    kept = [i for i, path in enumerate(chosen.paths) if _digest(path) not in seen]
    if not kept or len(kept) == len(chosen.paths):
        return chosen
    console.say(f"not used for verification: {len(chosen.paths) - len(kept)} copies of calibration images")
    labels = None if chosen.labels is None else tuple(chosen.labels[i] for i in kept)
    return ImageSelection(tuple(chosen.paths[i] for i in kept), labels, chosen.what)


def _digest(path: Path) -> str:
    try:
        return content_digest(path)
    except OSError:  # said where it is used
        return ""


def folders_of(texts: Sequence[str], names: Sequence[str]) -> dict[str, Path | None]:
    """Read ``--data`` of several sources: ``FOLDER`` for all of them, and ``NAME=FOLDER`` for one.

    Args:
        texts: values of ``--data``.
        names: of the sources.

    Raises:
        UsageError: no source has the name, or one has two folders.
    """
    found: dict[str, Path | None] = dict.fromkeys(names)
    own: set[str] = set()
    common: Path | None = None
    for text in texts:
        name, equals, folder = text.partition("=")
        if equals and folder and name in found:
            if name in own:
                raise UsageError(f"`--data` gives `{name}` two folders; give one")
            own.add(name)
            found[name] = Path(folder)
        elif equals and not Path(text).exists():
            raise UsageError(f"`--data` {text}: no source is called `{name}`; they are {', '.join(names)}")
        elif common is not None:
            raise UsageError(f"`--data` gives two folders for all sources, {common} and {text}; give NAME=FOLDER")
        else:
            common = Path(text)
    if common is not None:
        rest = [name for name in names if name not in own]
        found |= dict.fromkeys(rest, common)
        if len(rest) > 1:
            console.say(f"{common} is used for {len(rest)} sources; NAME=FOLDER gives a source its own images")
    return found
