"""Starts a run from a trained pack: the same task at another resolution, or a similar task."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vtk.card import Card
from vtk.data.audit.result import DataAudit
from vtk.data.record import read_record, sort_images
from vtk.errors import UsageError
from vtk.models.create import Created
from vtk.models.positions import describe_resampling, fit_position
from vtk.models.task_parameters import grid_of, head_names, position_names
from vtk.models.weights.class_names import describe_rows, match_rows, pick_rows
from vtk.packs.load import load_task

_HINT = "give a pack of the same model, or leave out --init-from"


def describe_overlap(card: Card, audit: DataAudit, what: str) -> list[str]:
    """Return a warning where a run is evaluated on images that its weights or pack were trained on.

    Args:
        card: of the weights or the pack.
        audit: of the run's images.
        what: name of the weights or the pack, for people.
    """
    record = read_record(card.data)
    seen = len(sort_images(record, audit, audit.val).trained) if record is not None else 0
    if not seen:
        return []
    return [
        f"{what} was trained on {seen} of the {len(audit.val)} held-out images, so accuracy on them is too high: "
        "give its --val-split and --seed, or a val/ folder of images that it has not seen"
    ]


def init_from_pack(
    path: Path, created: Created, audit: DataAudit, trained: frozenset[str], weights: Path | None
) -> list[str]:
    """Copy the trained tensors of a pack into the model of a run, in place.

    The position table is resampled where the sizes differ. Rows of the classifier are taken by the names of their
    classes, where the pack has them all.

    Args:
        path: the pack.
        created: the model, on its base.
        audit: of the run's images.
        trained: parameters that the run trains.
        weights: file with the base, if the run was given one.

    Returns:
        Lines for the user.

    Raises:
        UsageError: the pack is of another model, base or architecture, or trained tensors that this run leaves frozen.
        DataError: the pack is damaged.
    """
    task = load_task(path, base=weights)
    card, spec = task.card, created.spec
    if (card.model.name, card.model.kwargs) != (spec.name, spec.kwargs):
        other = f"{card.model.name} {card.model.kwargs or ''}".strip()
        raise UsageError(f"`--init-from` {path} is a {other}, not {spec.name} {spec.kwargs or ''}; {_HINT}")
    if card.transforms != created.transforms:
        raise UsageError(f"`--init-from` {path} was made with other --branches, --cb or --stem flags; repeat them")
    if card.base is None or card.base.id != created.base.ref.id:
        base = "no base" if card.base is None else f"base {card.base.id[:12]}"
        raise UsageError(f"`--init-from` {path} is of {base}, this run is of {created.base.ref.id[:12]}; {_HINT}")
    model: Any = created.model
    state, heads, positions = model.state_dict(), head_names(model), position_names(model)
    notes = [f"starts from {path}", *describe_overlap(card, audit, str(path))]
    taken: dict[str, Tensor] = {}
    rows = match_rows(card.classes, audit.classes)
    for key, value in task.model.state_dict().items():
        if key in heads:
            own = pick_rows(value, card.classes, rows) if value.shape[:1] == (len(card.classes),) else value
            if own is not None and own.shape == state[key].shape:
                taken[key] = own
        elif key in positions and card.input.size != created.input.size:  # as many tokens may be another grid of them
            if key in trained:
                grid = grid_of(task.model)
                taken[key] = fit_position(key, value, model, grid=grid, size=card.input.size, name=spec.name)
                if not torch.equal(taken[key], value):
                    notes.append(describe_resampling(key, value, taken[key], model, grid, card.input.size))
        elif key in trained and value.shape == state[key].shape:
            taken[key] = value
        elif value.shape != state[key].shape or not torch.equal(value, state[key]):
            raise UsageError(
                f"`--init-from` {path} changed `{key}`, which this run leaves as the base has it; train with the "
                "--train policy of that pack"
            )
    if note := describe_rows(card.classes, audit.classes):
        notes.append(note)
    model.load_state_dict(taken, strict=False)
    return notes
