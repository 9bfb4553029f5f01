"""The images of a folder that belong to a model: its classes, and the split that its training run held out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vtk import console
from vtk.data.audit import scan
from vtk.data.bands import pixel_limit
from vtk.data.images import one_line
from vtk.data.multi import scan_multi
from vtk.data.samples import DataAudit, Sample
from vtk.errors import DataError
from vtk.runtime.source import Source


def recorded_division(source: Source) -> dict[str, Any]:
    """Return how the training run divided a folder without splits: ``val_split`` and ``seed``; else nothing."""
    recorded = source.card.data
    division: dict[str, Any] = {key: recorded[key] for key in ("val_split", "seed") if key in recorded}
    return division if recorded.get("layout") == "flat" and len(division) == 2 else {}


def find_images(
    source: Source, data: Path, split: str, division: Mapping[str, Any] | None = None
) -> tuple[DataAudit, tuple[Sample, ...], bool]:
    """Scan a folder for a model's images and say what was odd.

    Args:
        source: its class names are those of the folder; one without names takes the folder's.
        data: the folder.
        split: ``train``, ``val`` or ``all``.
        division: of a folder without splits; by default the training run's.

    Returns:
        The audit, the split's images, and whether they are those that the training run held out.

    Raises:
        DataError: the folder's classes are not the model's, or the split has no images.
    """
    recorded = source.card.data
    own = recorded_division(source)
    taken = dict(own if division is None else division)
    limits: dict[str, Any] = {"in_chans": source.card.input.in_chans, "max_pixels": pixel_limit(source.card)}
    find = scan_multi if source.card.multi_label else scan
    audit = find(data, classes=source.card.classes if source.described else None, **limits, **taken)
    for bad in audit.bad:
        console.warn(f"skipped {one_line(bad.path)}: {bad.reason}")
    for warning in audit.warnings:
        console.warn(warning)
    for note in audit.notes:
        if "--val-split" not in note:  # a flag of finetune; how a flat folder is divided is said below
            console.say(note)
    if split == "all":
        return audit, _non_empty(audit.samples, data, split), False
    if audit.layout == "flat":
        if not taken:
            console.say(
                f"{data} does not say which images are held out, and the training run had another layout: all images "
                "are evaluated"
                if source.described
                else f"{data} does not say which images are held out: all images are taken"
            )
            return audit, _non_empty(audit.samples, data, split), False
        said = f"val_split {taken['val_split']}, seed {taken['seed']}"
        console.say(f"{data} is divided as in the training run ({said}); --split all takes every image")
    name = recorded.get("root")
    if name and name != audit.root.resolve().name:
        console.say(f"the training run's folder was called `{name}`, this one is `{audit.root.resolve().name}`")
    part = audit.val if split == "val" else audit.train
    same = split == "val" and audit.layout == recorded.get("layout") and taken == own
    return audit, _non_empty(part, data, split), same


def _non_empty(samples: tuple[Sample, ...], data: Path, split: str) -> tuple[Sample, ...]:
    if not samples:
        raise DataError(f"{data} has no readable images for --split {split}; try --split all")
    return samples
