"""Images of an analysis: the parts of a folder that its diagnostics take, the same for every compared model."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vtk import console
from vtk.analysis.config import AnalyzeConfig
from vtk.analysis.protocols import Split, settings_of
from vtk.card import Card
from vtk.data.audit.result import DataAudit, Sample
from vtk.data.record import read_record, sort_images
from vtk.errors import DataError, UsageError
from vtk.runtime.data_parts import choose_part, recorded_division
from vtk.runtime.images import find_images
from vtk.runtime.source import Source


@dataclass(frozen=True)
class Images:
    """The selected images of a model.

    Attributes:
        samples: files with labels, in order.
        classes: names of the labels; None if they are not the model's outputs.
        audit: of the folder.
        kind: ``training``, ``partly training``, ``held-out``, ``unseen``, or ``all`` where nothing says more.
    """

    samples: tuple[Sample, ...]
    classes: tuple[str, ...] | None
    audit: DataAudit
    kind: str = "held-out"

    def digest(self) -> str:
        """Return a hash of the images: names, labels and contents of the files."""
        return _digest(self.audit, self.samples)

    def folder_digest(self) -> str:
        """Return such a hash of all images of the folder."""
        return _digest(self.audit, self.audit.samples)

    def first(self, count: int) -> "Images":
        """Return the first images only."""
        return replace(self, samples=self.samples[:count])


def _digest(audit: DataAudit, samples: Sequence[Sample]) -> str:
    digest = hashlib.sha256()
    for path, label in samples:
        digest.update(f"{path.name}\0{label}\0{audit.digests.get(path, '')}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def choose_images(
    source: Source, config: AnalyzeConfig, trained: Sequence[Card] = (), *, split: Split = "val",
    like: Images | None = None,
) -> Images:  # fmt: skip
    """Return all images of a part in the order of the seed.

    Args:
        source: the model.
        config: folder and seed.
        trained: cards of the models that are analysed (`trained_cards`). The first defines the held-out images; those
            that another model was trained on are left out of them, and of the training images those that it was not
            trained on.
        split: the part.
        like: another part of the same folder, which is not read again.

    Raises:
        DataError: there are none, or the folder's classes are not the model's.
    """
    if config.data is None:
        raise UsageError("no images were given; give a folder with --data")
    whose = trained[0] if trained else source.card
    if like is None:
        audit, part = find_images(source, config.data, split, whose)
        classes = _classes(source, audit)
    else:
        audit, classes = like.audit, like.classes
        part = choose_part(
            whose, audit, config.data, split, described=source.described or whose is not source.card
        )  # fmt: skip
    samples = part.samples
    for card in trained[1:] if split != "all" else ():
        samples = _shared(card, audit, samples, split)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(config.seed)).tolist()
    kind = _kind(source.card, audit, samples, split, part.what)
    return Images(tuple(samples[i] for i in order), classes, audit, kind)


def _kind(card: Card, audit: DataAudit, samples: Sequence[Sample], split: Split, what: str) -> str:
    """Return which images these are for a model, by the list in its card, else by the folder."""
    record = read_record(card.data)
    if record is not None and record.train is not None:
        seen = len(sort_images(record, audit, samples).trained)
        if seen:
            return "training" if seen == len(samples) else "partly training"
        return "unseen" if split == "train" else "held-out"
    named = next((kind for kind in ("training", "held-out", "unseen") if what.startswith(kind)), "all")
    return "all" if split == "all" else named


class Selection:
    """The images of each diagnostic of one model: those of the part that its settings name.

    Args:
        source: the model.
        config: options.
        trained: see `choose_images`.
    """

    def __init__(self, source: Source, config: AnalyzeConfig, trained: Sequence[Card] = ()) -> None:
        self.source, self.config, self.trained = source, config, trained
        self._parts: dict[Split, Images] = {}

    def of(self, name: str) -> Images:
        """Return the images of a diagnostic.

        Where a folder has no training images, those that it has take their place, and this is said.

        Raises:
            DataError: there are none, or the folder's classes are not the model's.
        """
        settings = settings_of(self.config, name)
        part = self._part(settings.split)
        return part.first(settings.limit(len(part.samples)))

    def _part(self, split: Split) -> Images:
        if split not in self._parts:
            self._parts[split] = self._choose(split)
        return self._parts[split]

    def _choose(self, split: Split) -> Images:
        like = next(iter(self._parts.values()), None)
        try:
            return choose_images(self.source, self.config, self.trained, split=split, like=like)
        except DataError as error:
            if split != "train" or self.config.split is not None:
                raise
            held = self._part("val")  # which raises where the folder itself is at fault
            those = [name for name in self.config.chosen() if settings_of(self.config, name).split == "train"]
            console.warn(f"{error}; {', '.join(those)} take {held.kind} images, unlike in the papers")
            return held


def _classes(source: Source, audit: DataAudit) -> tuple[str, ...] | None:
    if source.described:
        return source.card.classes
    outputs = len(source.card.classes)
    if outputs != len(audit.classes):
        console.warn(
            f"{source.name} has {outputs} outputs without class names, the folder has {len(audit.classes)} classes: "
            "diagnostics that need labels are skipped; fine-tune first, or give --num-classes for a random head"
        )
        return None
    if source.random_classifier:
        console.warn(f"{source.name} has a random classifier: its accuracy and loss are at chance level")
    else:
        console.say(f"the sorted classes of the folder are assigned to the {outputs} outputs of {source.name} in order")
    return tuple(audit.classes)


def trained_cards(sources: Sequence[Source]) -> tuple[Card, ...]:
    """Return the cards that record the training images of their runs."""
    cards = tuple(source.card for source in sources if source.card.data.get("images") or recorded_division(source.card))
    divisions = [division for card in cards if (division := recorded_division(card))]
    if any(division != divisions[0] for division in divisions):
        console.warn("the models were trained with different held-out images; those of the first are used for both")
    return cards


def _shared(card: Card, audit: DataAudit, samples: tuple[Sample, ...], split: Split) -> tuple[Sample, ...]:
    """Leave out the images that are of another part for one more model: those it was, or was not, trained on."""
    record = read_record(card.data)
    if record is None or record.train is None:
        return samples
    seen = {sample.path for sample in sort_images(record, audit, samples).trained}
    if split == "train":
        if not seen:
            console.warn("the other model was trained on none of these images")
        elif len(seen) < len(samples):
            console.say(f"left out: {len(samples) - len(seen)} images that the other model was not trained on")
            return tuple(sample for sample in samples if sample.path in seen)
    elif len(seen) == len(samples):
        console.warn("the other model was trained on all of these images")
    elif seen:
        console.say(f"left out: {len(seen)} images that the other model was trained on")
        return tuple(sample for sample in samples if sample.path not in seen)
    return samples
