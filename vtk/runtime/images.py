"""Finds the images of a folder that belong to a model's classes, in the requested split."""

import contextlib
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vtk import console
from vtk.card import Card
from vtk.data.audit.folder_scan import scan
from vtk.data.audit.multilabel_scan import scan_multi
from vtk.data.audit.result import DataAudit, Sample
from vtk.data.decoding.decode import pixel_limit
from vtk.data.decoding.rules import Decoding
from vtk.data.probing.probe import content_digest
from vtk.data.probing.probe_files import Look
from vtk.data.record import read_record
from vtk.data.sources.image_set import list_images
from vtk.data.sources.layout import find_layout
from vtk.data.sources.table import is_table
from vtk.errors import DataError
from vtk.runtime.data_parts import Part, Split, choose_part, recorded_division
from vtk.runtime.source import Source
from vtk.text import one_line


def find_images(source: Source, data: Path, split: Split, whose: Card | None = None) -> tuple[DataAudit, Part]:
    """Scan a folder for a model's images, and print warnings.

    Args:
        source: its class names must be those of the folder; one without names takes the folder's.
        data: the folder.
        split: ``train``, ``val`` or ``all``.
        whose: the card that lists the held-out images; by default the source's own.

    Returns:
        The audit, and the images of the part.

    Raises:
        DataError: the folder's classes are not the model's, or the part has no images.
    """
    whose = source.card if whose is None else whose
    options: dict[str, Any] = {
        "in_chans": source.card.input.in_chans, "max_pixels": pixel_limit(source.card), "spec": source.card.input,
        "decoding": Decoding.of(source.card.input), **recorded_division(whose),
        **_reading(whose, source.card.multi_label),
    }  # fmt: skip
    find = scan_multi if source.card.multi_label else scan
    audit = find(data, classes=source.card.classes if source.described else None, **options)
    for bad in audit.bad:
        console.warn(f"skipped {one_line(bad.path)}: {bad.reason}")
    for warning in audit.warnings:
        console.warn(warning)
    for note in audit.notes:
        if "--val-split" not in note:  # a flag of finetune; how a flat folder is divided is said below
            console.say(note)
    return audit, choose_part(whose, audit, data, split, described=source.described or whose is not source.card)


def _reading(card: Card, multi_label: bool) -> dict[str, Any]:
    """Return the options of `vtk.data.scan` with which the training run read its images."""
    # version 0.1, whose cards list no images, did not keep copies of one image together
    options: dict[str, Any] = {"together": bool(card.data.get("images")) or not card.data}
    names = ("field_separator", "label_separator") if multi_label else ("field_separator",)
    return options | {name: value for name in names if isinstance(value := card.data.get(name), str)}


class ImageSelection(NamedTuple):
    """Image files to verify or calibrate an export with.

    Attributes:
        paths: in the order of the folder.
        labels: of each; None if the folder does not have the model's classes.
        what: description for messages.
    """

    paths: tuple[Path, ...]
    labels: tuple[int, ...] | None
    what: str


def choose_images(card: Card, data: Path, split: Split, *, described: bool = True) -> ImageSelection:
    """Return the images of one split of a folder, and print which; decoded only for cards that do not list them.

    Args:
        card: of the model.
        data: an image, a folder of images at any depth, or a data set as `find_images` takes it.
        split: which part; a folder of images that the run has not seen is taken whole (`vtk.runtime.data_parts`).
        described: whether the card's classes have names.

    Raises:
        DataError: there is no such image.
    """
    if data.is_file() and not is_table(data):
        return ImageSelection((data,), None, f"{data}")
    look = _look(card)
    options: dict[str, Any] = {
        "in_chans": card.input.in_chans, "max_pixels": pixel_limit(card), "look": look, "spec": card.input,
        "decoding": Decoding.of(card.input),
        **recorded_division(card), **_reading(card, card.multi_label),
    }  # fmt: skip
    find = scan_multi if card.multi_label else scan
    try:
        audit: DataAudit = find(data, classes=card.classes if described else None, **options)
    except DataError:  # its folders are not the model's classes
        audit = _loose(data, look)
        if audit.layout == "flat" and look != "read":
            return ImageSelection(tuple(sample.path for sample in audit.train), None, f"images of {data}")
    for warning in audit.warnings:
        console.warn(warning)
    part = choose_part(card, audit, data, split, described=described)
    known = described and not card.multi_label and audit.classes == card.classes
    labels = tuple(sample.label for sample in part.samples) if known else None
    return ImageSelection(tuple(sample.path for sample in part.samples), labels, part.what)


def _look(card: Card) -> Look:
    """Return how much of each file is read: only as much as the selection needs."""
    record = read_record(card.data)
    if record is not None and (record.val is not None or record.train is not None):
        return "read"  # contents are compared with those of the run
    return "decode" if recorded_division(card) else "list"  # a run divided those that can be read


def _loose(data: Path, look: Look) -> DataAudit:
    """Return all images below a folder; those of ``train/`` and ``val/`` separately, if it has both."""
    with contextlib.suppress(DataError):
        layout = find_layout(data)
        if layout.kind == "split" and layout.train and layout.val:
            return _without_classes(data, "split", _samples(layout.train), _samples(layout.val), look)
    return _without_classes(data, "flat", _samples(data), (), look)


def _without_classes(
    data: Path, layout: Literal["split", "flat"], train: tuple[Sample, ...], val: tuple[Sample, ...], look: Look
) -> DataAudit:
    digests: dict[Path, str] = {}
    for sample in (*train, *val) if look == "read" else ():
        with contextlib.suppress(OSError):  # said where it is used
            digests[sample.path] = content_digest(sample.path)
    return DataAudit(data, layout, (), train, val, digests=digests)


def _samples(folder: Path) -> tuple[Sample, ...]:
    return tuple(Sample(path, 0) for path in list_images(folder))
