"""Writes task packs: a folder of the tensors that differ from the base, the card, and hashes of the base.

``task.safetensors`` holds every trained tensor, the position table, the classifier, every tensor the base does not have
at this shape, and every tensor whose bytes changed. ``task.json`` is the card; ``base_tensors.json`` has one sha256 per
tensor of the base, so that any file with the same values fits. `vtk.packs.int8` describes how int8 is stored,
`vtk.packs.factors` how factors are.
"""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vtk.card import FACTORS_SCHEMA, FIRST_SCHEMA, Card
from vtk.errors import VtkError
from vtk.files import existing_dir, replace_dir
from vtk.formats import save_tensors, write_json
from vtk.models.create import Created, build_model
from vtk.models.task_parameters import head_names, position_names
from vtk.packs.cards import CARD, HASHES, TENSORS
from vtk.packs.config import PackDtype
from vtk.packs.factors import Factors, merge_factors, split_tensors
from vtk.packs.rounding import check_factors, start_hashes, start_layout, store, store_factors, to_dtype


class FrozenTensorChanged(VtkError):
    """A frozen tensor differs from the base: a bug of the training code."""


def save_task(
    path: str | Path,
    *,
    state: Mapping[str, Tensor],
    created: Created,
    card: Card,
    trained: Collection[str],
    dtype: PackDtype = "fp32",
    factors: Mapping[str, Factors] | None = None,
    pack: Mapping[str, Any] | None = None,
) -> Card:
    """Write a pack atomically.

    Args:
        path: the pack's folder; replaced.
        state: the model's state dict with plain timm keys, trained tensors as fp32 masters. Frozen tensors may be
            stored in a lower precision; they are compared with the base at that precision.
        created: the model as created, with its base.
        card: its ``model``, ``input``, ``base`` and ``transforms`` are taken from ``created``.
        trained: keys that training changed on purpose, buffers of trained modules included.
        dtype: of the floating-point tensors in the file; with ``int8`` the rounding error is measured and recorded in
            the card, under ``pack``. With ``factors`` it is the type of these; all other tensors stay exact.
        factors: changes of matrices, by name, which are stored in place of these tensors of ``state``; they start from
            the model as created from the base.
        pack: more for the card's ``pack``: JSON values of how the factors were made.

    Returns:
        The card as written.

    Raises:
        FrozenTensorChanged: raised after the pack was written with the changed tensor in it.
        UsageError: factors of no matrix of the model, or of one that does not start from the base.
        DataError: the folder cannot be written, or factors hold impossible numbers.
    """
    path = Path(path)
    tensors, changed = select_tensors(state, created, trained)

    def start(name: str) -> Tensor | None:
        key = created.key_map.get(name)
        return created.base.tensors[key] if key is not None and key in created.base.hashes else None

    if factors:
        check_factors(factors, created, state)
        starts = start_hashes(factors, created)
        stored, facts = store_factors(
            tensors, dtype, factors, trained=trained, starts=starts,
            model=lambda: _rebuild(created, state, len(card.classes), factors), spec=created.input,
        )  # fmt: skip
        if layout := start_layout(created.base):
            facts["start_layout"] = layout
    else:
        stored, facts = store(
            tensors, dtype, trained=trained, start=start,
            model=lambda: _rebuild(created, state, len(card.classes), {}), spec=created.input,
        )  # fmt: skip
    card = dataclasses.replace(
        card,
        schema=FACTORS_SCHEMA if factors else FIRST_SCHEMA,
        model=created.spec,
        input=created.input,
        base=created.base.ref,
        transforms=created.transforms,
        pack={**(pack or {}), **facts},
    )
    if factors:
        split_tensors(stored, card, path)  # what cannot be read again is not written
    with replace_dir(path) as tmp:
        write_pack(tmp, stored, created.base.hashes, card)
    if changed:
        raise FrozenTensorChanged(
            f"{len(changed)} frozen tensors changed while training, first `{changed[0]}`; {path} carries them, so it "
            "is correct but larger; please report this with the command you ran"
        )
    return card


def write_pack(folder: Path, stored: Mapping[str, Tensor], hashes: Mapping[str, str], card: Card) -> None:
    """Write the three files of a pack into an empty folder."""
    save_tensors(folder / TENSORS, stored)
    write_json(folder / HASHES, dict(sorted(hashes.items())))
    write_json(folder / CARD, card.to_dict())


def select_tensors(
    state: Mapping[str, Tensor], created: Created, trained: Collection[str]
) -> tuple[dict[str, Tensor], list[str]]:
    """Select the tensors that a pack must hold.

    Returns:
        The tensors, and the names of frozen ones among them that differ from the base.
    """
    chosen: dict[str, Tensor] = {}
    changed: list[str] = []
    own = head_names(created.model) | position_names(created.model) | created.initial.keys()
    for key, value in state.items():
        if key in trained:
            chosen[key] = value
            continue
        # `initial` has every tensor the base cannot supply, so the key map leads to one for all others
        start = created.initial[key] if key in created.initial else created.base.tensors[str(created.key_map[key])]
        if not _same(value, start):
            changed.append(key)
            chosen[key] = value
        elif key in own:
            chosen[key] = start  # the full-precision copy, where training stored the frozen tensor shorter
    return chosen, changed


def update_card(path: Path, card: Card) -> None:
    """Replace the card of a pack."""
    write_json(existing_dir(path) / CARD, card.to_dict())


def _same(value: Tensor, start: Tensor) -> bool:
    """Bitwise equality after rounding the start to the dtype the value is stored in."""
    a = value.detach().cpu()
    b = start.to(a.dtype)
    if a.shape != b.shape:
        return False
    a, b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _rebuild(
    created: Created, state: Mapping[str, Tensor], num_classes: int, factors: Mapping[str, Factors]
) -> nn.Module:
    """Build the plain model again, ``factors`` merged: the trained one may be on a device, rounded or changed."""
    model = build_model(
        created.spec.name,
        num_classes=num_classes,
        img_size=created.input.size,
        in_chans=created.input.in_chans,
        transforms=created.transforms,
        kwargs=created.spec.kwargs,
        base=created.base,
        input=created.input,
    ).model
    whole = {k: to_dtype(v, torch.float32) for k, v in state.items()}
    whole |= {name: model.state_dict()[name].clone() for name in factors}
    model.load_state_dict(whole, strict=True)
    merge_factors(model, factors, "the pack")
    return model.eval()
