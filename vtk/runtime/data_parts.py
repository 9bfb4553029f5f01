"""Selects the training or held-out part of a folder, so that a model is tested on images it was not trained on.

One rule for all commands. ``val`` is what the training run held out, ``train`` what it trained on, by content and not
by number: the card lists both (`vtk.data.record`). A folder that has no image of the run is taken as it is: its
``val/`` or ``train/`` if it has them, else all of it. Whatever is left out is said.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vtk import console
from vtk.card import Card
from vtk.data.audit.result import DataAudit, Sample
from vtk.data.record import ImagesByUse, Record, read_record, same_images, sort_images
from vtk.errors import DataError

Split = Literal["val", "train", "all"]


class Part(NamedTuple):
    """Images that were chosen.

    Attributes:
        samples: files and labels.
        what: they are, in words, such as "held-out images of data/pets".
        same: whether they are exactly those that the training run held out.
        left_out: why images of the folder are not among them → how many.
    """

    samples: tuple[Sample, ...]
    what: str
    same: bool = False
    left_out: Mapping[str, int] = {}


def choose_part(card: Card, audit: DataAudit, data: Path, split: Split, *, described: bool = True) -> Part:
    """Return the images of a part, and say which they are.

    Args:
        card: of the model; its ``data`` says what the training run did with its images.
        audit: of the folder; a folder without parts is divided by the card's ``val_split`` and ``seed``.
        data: the folder as it was given.
        split: which part.
        described: whether the card is of a trained model.

    Raises:
        DataError: there is no such image, or the card's list of images is damaged.
    """
    record = read_record(card.data)
    if split == "all":
        every = _require_samples(audit.samples, data, split)
        console.say(f"all {len(every)} images of {data}{_of_the_run(record, audit)}")
        return Part(every, f"images of {data}")
    if record is not None and (record.val is not None or record.train is not None):
        return _recorded(record, audit, data, split)
    return _divided(card, audit, data, split, described)


def _of_the_run(record: Record | None, audit: DataAudit) -> str:
    """Return a warning of how many images the model was trained on, if any of them are used."""
    by_run = sort_images(record, audit, audit.samples) if record is not None else None
    if by_run is None or not by_run.trained:
        return ""
    counts = {"trained on": by_run.trained, "held out": by_run.held}
    counted = ", ".join(f"{len(images)} that the run {why}" for why, images in counts.items() if images)
    new = f", {len(by_run.new)} unknown to it" if by_run.new else ""
    return f": {counted}{new}; accuracy on its own training images is too optimistic"


def _recorded(record: Record, audit: DataAudit, data: Path, split: Split) -> Part:
    """Select by the list of the run's images in the card."""
    mine, other = ("held out", "trained on") if split == "val" else ("trained on", "held out")
    by_run = sort_images(record, audit, audit.samples)
    if not by_run.known:
        if record.val is None or record.train is None:
            unlisted = "trained on" if record.train is None else "held out"
            console.warn(
                f"the card does not list what the training run {unlisted}: they were too many; images of "
                "this folder that are among them are not recognised"
            )
        if by_run.named:
            console.warn(
                f"{by_run.named} images of {data} have the paths of the training run's, with other content: if they "
                "are the same images, saved again, it was trained on some of them"
            )
        if audit.layout == "flat":
            console.say(f"no image of {data} is one of the training run's: all {len(audit.samples)} are taken")
            return Part(_require_samples(audit.samples, data, split), f"images of {data}")
        part = audit.val if split == "val" else audit.train
        name = "held-out" if split == "val" else "training"
        console.say(f"no image of {data} is one of the training run's: the {len(part)} of its {name} part are taken")
        return Part(_require_samples(part, data, split), f"{name} images of {data}")
    unseen = False
    wrong = {sample.path for sample in (by_run.trained if split == "val" else by_run.held)}
    if audit.layout == "split":
        own = audit.val if split == "val" else audit.train
        taken = tuple(sample for sample in own if sample.path not in wrong)
        left = {other: len(own) - len(taken)}
    else:
        right = by_run.held if split == "val" else by_run.trained
        if (record.val if split == "val" else record.train) is None:  # too many to be listed
            right = by_run.new
        if unseen := not right and bool(by_run.new):  # other images, of which it knows some
            right = by_run.new
        taken = right
        left = {other: len(wrong), "unknown to it": len(audit.samples) - len(wrong) - len(taken)}
    left = {why: count for why, count in left.items() if count}
    if not taken:
        where = f"the {'held-out' if split == 'val' else 'training'} part of {data}"
        few = f"it {other} all {len(wrong)} of its images" if audit.layout == "flat" else f"it {other} all of them"
        raise DataError(
            f"{data if audit.layout == 'flat' else where} has no image that the training run {mine}: {few}; give other "
            "images, or --split all"
        )
    same = split == "val" and same_images(record, audit, taken)
    text = f"{len(taken)} images of {data}: those that the training run {mine}"
    if audit.layout == "split" and not same:
        folder = "held-out" if split == "val" else "training"
        text = f"{len(taken)} images of {data}: its {folder} part"
    elif unseen:
        text = f"{len(taken)} images of {data}: those that the training run has not seen"
    if left:
        reasons = ", ".join(f"{count} that it {why}" if " on" in why or " out" in why else f"{count} {why}"
                            for why, count in left.items())  # fmt: skip
        text += f"; left out: {reasons} (--split all takes every image)"
    console.say(text)
    if not unseen:
        _warn_of_changes(by_run, record, split, data)
    kind = "unseen" if unseen else "held-out" if split == "val" else "training"
    return Part(taken, f"{kind} images of {data}", same, left)


def _warn_of_changes(by_run: ImagesByUse, record: Record, split: Split, data: Path) -> None:
    if split != "val":
        return
    if by_run.missing:
        count = len(record.val or ())
        console.warn(f"{by_run.missing} of the {count} images that the training run held out are not in {data}")
    if by_run.changed:
        console.warn(f"{by_run.changed} of the images that the training run held out have changed since")


def _divided(card: Card, audit: DataAudit, data: Path, split: Split, described: bool) -> Part:
    """Select by how the run split its folder, for cards that list no images (version 0.1, other models)."""
    division, recorded = recorded_division(card), card.data
    if audit.layout == "flat" and not division:
        console.say(
            f"{data} does not say which images are held out, and the training run had another layout: all "
            f"{len(audit.samples)} images are taken"
            if described
            else f"{data} does not say which images are held out: all {len(audit.samples)} images are taken"
        )
        return Part(_require_samples(audit.samples, data, split), f"images of {data}")
    name = recorded.get("root")
    if name and name != audit.root.resolve().name:
        console.say(f"the training run's folder was called `{name}`, this one is `{audit.root.resolve().name}`")
    part = _require_samples(audit.val if split == "val" else audit.train, data, split)
    what = f"{'held-out' if split == 'val' else 'training'} images of {data}"
    count = card.metrics.get("count")
    same = split == "val" and audit.layout == recorded.get("layout") and count in (None, len(part))
    if audit.layout == "flat":
        said = f"val_split {division['val_split']}, seed {division['seed']}"
        console.say(
            f"{data} is divided as in the training run ({said}): {len(part)} {what}; --split all takes every image"
        )
    else:
        console.say(f"{len(part)} {what}")
    if recorded and split == "val" and isinstance(count, int) and count != len(part):
        console.warn(
            f"the training run held out {count} images, this part of {data} has {len(part)}; its card does not list "
            "them, so if the folder has changed since, images that it trained on may be among these"
        )
    return Part(part, what, same)


def recorded_division(card: Card) -> dict[str, Any]:
    """Return ``val_split`` and ``seed`` of a training run that split a flat folder; else an empty mapping."""
    division: dict[str, Any] = {key: card.data[key] for key in ("val_split", "seed") if key in card.data}
    return division if card.data.get("layout") == "flat" and len(division) == 2 else {}


def _require_samples(samples: tuple[Sample, ...], data: Path, split: str) -> tuple[Sample, ...]:
    if not samples:
        raise DataError(f"{data} has no readable images for --split {split}; try --split all")
    return samples
