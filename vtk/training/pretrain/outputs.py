"""Files and printed lines of a pre-training run beside those of every run (`vtk.training.runs.outputs`)."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from vtk import console, files
from vtk.card import Card
from vtk.data.audit.result import DataAudit
from vtk.formats import save_tensors
from vtk.packs.load import card_metadata
from vtk.text import one_line

PREFIX = "backbone."


def save_backbone(path: Path, state: Mapping[str, Tensor], card: Card) -> None:
    """Write the backbone's part of a model's state dict as a checkpoint, whole or not at all."""
    kept = {key.removeprefix(PREFIX): value for key, value in state.items() if key.startswith(PREFIX)}
    with files.replace_file(path) as tmp:
        save_tensors(tmp, kept, card_metadata(card))


def print_images(audit: DataAudit) -> None:
    """Print a summary of the images; by class for labelled runs."""
    if audit.classes:
        audit.print()
        return
    sizes = audit.sizes
    console.say(f"{len(audit.train)} training images and {len(audit.val)} held out, in {one_line(audit.root)}")
    console.say(
        f"size (height×width): smallest {sizes['min_height']}×{sizes['min_width']}, largest {sizes['max_height']}×"
        f"{sizes['max_width']} px; modes: " + ", ".join(f"{mode} {count}" for mode, count in audit.modes.items())
    )
    audit.print_remarks()
