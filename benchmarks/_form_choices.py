"""Rows of `e2e` as choices of the operation "ln_folded": which form of the fused model is the quicker.

A form is chosen for a whole forward pass, so whole models decide, each in a CUDA graph.
"""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import _bounds
import _choices
import timm
import torch
from _models import END_TO_END

from vtk_kernels import choices

Entry = dict[str, Any]
ANSWERS = {_bounds.FUSED: "separate", _bounds.FOLDED: "folded"}
"""Provider of `e2e` to what it decides for."""


def entries(rows: Iterable[Mapping[str, str]]) -> list[Entry]:
    """Return one entry per shape of which both forms were measured, and right.

    The entry also holds the medians it was decided by, in microseconds.

    Args:
        rows: of `e2e`, the last of each cell.
    """
    cells: dict[tuple[str, ...], dict[str, Mapping[str, str]]] = {}
    for row in rows:
        if row["provider"] in ANSWERS and row["passed"] == "True" and row["model"] in END_TO_END:
            cell = tuple(row[name] for name in ("model", "px", "batch", "dtype", "device", "torch", "triton"))
            cells.setdefault(cell, {})[ANSWERS[row["provider"]]] = row
    return [_entry(cell) for cell in cells.values() if cell.keys() == set(ANSWERS.values())]


def _entry(cell: Mapping[str, Mapping[str, str]]) -> Entry:
    us = {answer: round(1e3 * float(cell[answer]["median_ms"]), 1) for answer in sorted(cell)}
    row = cell["separate"]
    tokens, channels, hidden = shape(row["model"], int(row["px"]))
    versions = {name: ".".join(row[name].split(".")[:2]) for name in ("torch", "triton")}
    return {
        "device": row["device"], **versions, "op": "ln_folded", "dtype": row["dtype"],
        "rows": int(row["batch"]) * tokens, "n": channels, "k": hidden, "choice": min(us, key=us.__getitem__), "us": us,
    }  # fmt: skip


def write(path: Path, found: Iterable[Entry]) -> None:
    """Write a choice table with ``found`` in place of what it says about the same shapes.

    Args:
        path: of the table; where the stage ``kernels`` wrote one its entries stay, else the package's own do.
        found: entries.
    """
    measured = choices.read(path) if path.exists() else []
    _choices.write(path, [*measured, *found])


@functools.cache
def shape(name: str, px: int) -> tuple[int, int, int]:
    """Return tokens of an image, channels, and the width of the hidden layer of all branches of a model."""
    made = END_TO_END[name]
    with torch.device("meta"):
        model: Any = timm.create_model(made.timm, **{**made.kwargs, "img_size": px, "depth": 1})
    hidden = sum(layer.in_features for name, layer in model.blocks[0].named_modules() if name.endswith("fc2"))
    return model.patch_embed.num_patches + model.num_prefix_tokens, model.embed_dim, hidden
