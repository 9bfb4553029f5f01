"""The images of a folder that belong to a model: its classes, and the part that is asked for."""

from pathlib import Path
from typing import Any

from vtk import console
from vtk.card import Card
from vtk.data.audit import scan
from vtk.data.bands import pixel_limit
from vtk.data.images import one_line
from vtk.data.multi import scan_multi
from vtk.data.rules import Decoding
from vtk.data.samples import DataAudit
from vtk.runtime.parts import Part, Split, choose_part, recorded_division
from vtk.runtime.source import Source


def find_images(source: Source, data: Path, split: Split, whose: Card | None = None) -> tuple[DataAudit, Part]:
    """Scan a folder for a model's images and say what was odd.

    Args:
        source: its class names are those of the folder; one without names takes the folder's.
        data: the folder.
        split: ``train``, ``val`` or ``all``.
        whose: the card that says which images were held out, by default the source's own.

    Returns:
        The audit, and the images of the part.

    Raises:
        DataError: the folder's classes are not the model's, or the part has no images.
    """
    whose = source.card if whose is None else whose
    options: dict[str, Any] = {
        "in_chans": source.card.input.in_chans, "max_pixels": pixel_limit(source.card),
        "decoding": Decoding.of(source.card.input), **recorded_division(whose)
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
