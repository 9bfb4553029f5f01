"""Makes a pack of a PEFT adapter: PEFT merges it into timm's model, and the tensors that changed are the pack."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from vtk.card import Card, ModelSpec
from vtk.errors import DataError, UsageError
from vtk.formats import read_json
from vtk.models.inputs import Size, blank_model, check_size, input_spec
from vtk.models.task_parameters import head_names, position_names
from vtk.models.weights.base import Base, make_base
from vtk.models.weights.files import read_safetensors
from vtk.models.weights.sources import read_base
from vtk.packs.adapters import BASE, CARD_KEY, CONFIG, WEIGHTS, import_peft, timm_call
from vtk.packs.base_files import base_keys, store_base
from vtk.packs.bundle import PACK_MARKS, claim_out
from vtk.packs.cards import read_card
from vtk.packs.expressions import check_config
from vtk.packs.load import build_from_card
from vtk.packs.lora_factors import as_stored, unchanged_tables
from vtk.packs.pack import save_task, select_tensors
from vtk.packs.peft_merge import check_complete, merge_adapter
from vtk.readers import reading


@dataclass(frozen=True)
class ModelDescription:
    """The model that an adapter was trained on and its classes, which its files do not say.

    Attributes:
        card: a pack, its task.json or a merged checkpoint of that model.
        model: name of a timm model, in place of ``card``; the other fields go with it.
        model_kwargs: arguments for timm.
        classes: names in index order.
        img_size: pixels; by default the model's own.
    """

    card: Path | None = None
    model: str | None = None
    model_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    classes: Sequence[str] = ()
    img_size: Size = None


def from_peft(
    adapter: Path,
    out: Path,
    *,
    base: Path | None = None,
    described: ModelDescription | None = None,
    overwrite: bool = False,
) -> Card:  # fmt: skip
    """Write the pack of an adapter: LN_TUNING, LoRA and every other tuner that PEFT can merge into the model.

    Args:
        adapter: folder with adapter_config.json and adapter_model.safetensors.
        out: the pack's folder.
        base: weights that the adapter was trained on; by default the base.safetensors in its folder.
        described: the model; by default the card that `vtk.packs.to_peft` wrote into the adapter's file.
        overwrite: replace an existing pack.

    Returns:
        The card of the pack. It has no metrics: nothing was measured.

    Raises:
        UnavailableError: PEFT is not installed.
        UsageError: ``out`` exists, or the model is not fully described.
        DataError: a file is absent or damaged, or PEFT cannot merge the adapter into this model and base.
        VerificationError: the logits of the merged model differ from those with the adapter.
    """
    peft = import_peft()
    with claim_out(out, PACK_MARKS, overwrite=overwrite):
        kind = _check_kind(peft, adapter, config := _read_config(adapter))
        tensors, metadata = read_safetensors(adapter / WEIGHTS)
        card = _card(adapter, metadata, described or ModelDescription())
        with reading(adapter, "has a card that fits no model", "was it edited?"):
            timm_call(card)
        if base is None and not (adapter / BASE).is_file():
            raise UsageError(f"{adapter} has no {BASE}; give the weights that the adapter was trained on: --base FILE")
        created = build_from_card(card, base=_read_base(base or adapter / BASE, card))
        modules = (name for name, _ in created.model.named_modules())
        check_config(config, adapter / CONFIG, (*modules, *created.model.state_dict()))
        state, factors = merge_adapter(peft, created, adapter, tensors, kind, card.input)
        check_complete(created, state, adapter, len(card.classes))
        changed = select_tensors(state, created, ())[1]
        store_base(created.base)
        card = dataclasses.replace(
            card.uncalibrated(), base=None, metrics={}, versions=_versions(), command="", pack={}
        )
        dtype = as_stored(factors)
        if factors:
            factors |= unchanged_tables(created, state)
        return save_task(out, state=state, created=created, card=card, trained=changed, dtype=dtype, factors=factors)


def _read_config(adapter: Path) -> dict[str, Any]:
    """Return the adapter's config."""
    if not (adapter / CONFIG).is_file():
        raise DataError(
            f"{adapter} is not an adapter: it has no {CONFIG}; give the folder that PEFT's save_pretrained wrote"
        )
    config = read_json(adapter / CONFIG, limit=1 << 20)
    if not isinstance(config, dict):
        raise DataError(f"{adapter / CONFIG} names no `peft_type`; was it edited?")
    return config


_LOST = {"lora_ga": "LoRA-GA", "corda": "CorDA"}
"""Initialisations of LoRA that also change the base, by products that follow from data and are not in the file."""


def _check_kind(peft: Any, adapter: Path, config: Mapping[str, Any]) -> str:
    """Return the name of the adapter's tuner."""
    kind = config.get("peft_type")
    if not isinstance(kind, str):
        raise DataError(f"{adapter / CONFIG} names no `peft_type`; was it edited?")
    if kind not in [member.value for member in peft.PeftType]:
        raise DataError(
            f"{adapter / CONFIG}: the installed PEFT {peft.__version__} has no tuner {kind[:60]!r}; upgrade peft"
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and (name := _LOST.get(start.lower())):
        raise DataError(
            f"{adapter} is of {name}, whose start changed the base by a product that the file does not hold; save it "
            "as plain LoRA, with path_initial_model_for_weight_conversion of PEFT's save_pretrained; or, where --base "
            f"is the changed one, set `init_lora_weights` in {CONFIG} to true"
        )
    if not (adapter / WEIGHTS).is_file() and (adapter / "adapter_model.bin").is_file():
        raise DataError(
            f"{adapter} holds a pickle (adapter_model.bin), which can run code when read; where you trust it, load it "
            "with PEFT and save it again, as safetensors"
        )
    return kind


def _card(adapter: Path, metadata: Mapping[str, str], description: ModelDescription) -> Card:
    if description.model is None and (description.classes or description.img_size or description.model_kwargs):
        raise UsageError("`--classes`, `--img-size` and `--model-kwargs` go with --model NAME")
    if description.model is not None:
        if description.card is not None:
            raise UsageError("`--card` and `--model` both name the model; give one of them")
        if not description.classes:
            raise UsageError("`--model` has no class names; give --classes, in the order of the classifier's rows")
        names = tuple(description.classes)
        if len(set(names)) != len(names):
            raise UsageError(f"`--classes`: a name occurs twice among {len(names)}; give different names")
        size = check_size(description.model, description.img_size, description.model_kwargs)
        spec = input_spec(description.model, description.model_kwargs, size, 3)
        return Card(ModelSpec(description.model, dict(description.model_kwargs)), spec, names)
    if description.card is not None:
        path = description.card
        return read_card(path.parent if path.name == "task.json" else path)
    if CARD_KEY in metadata:
        return Card.from_json(metadata[CARD_KEY], adapter / WEIGHTS)
    raise UsageError(f"{adapter} does not name its model; give --card PACK, or --model NAME and --classes A B …")


def _read_base(path: Path, card: Card) -> Base:
    """Read base weights; those that `to_peft` wrote have the names and the stem from after the pack's transforms."""
    metadata = read_safetensors(path)[1] if path.suffix == ".safetensors" and path.is_file() else {}
    if CARD_KEY not in metadata:
        return read_base(card.model.name, card.model.kwargs, path)[0]
    own = Card.from_json(metadata[CARD_KEY], path)
    if (own.model, own.transforms) != (card.model, card.transforms):
        raise DataError(
            f"{path} is the base of {own.model.name} {own.model.kwargs}, the adapter's card says {card.model.name} "
            f"{card.model.kwargs}, or other transforms; give the base it was trained on"
        )
    tensors, keys = read_safetensors(path)[0], base_keys(own, path)
    made = {name: value for name, value in tensors.items() if keys(name) is None}
    before = {str(keys(name)): value for name, value in tensors.items() if name not in made}
    blank = blank_model(own.model.name, own.model.kwargs)
    for name in made.keys() & blank.state_dict().keys():  # an adapted stem is the pack's; the base's is not known
        before[name] = torch.zeros(blank.state_dict()[name].shape)
    task = head_names(blank, before) | position_names(blank, before)
    found = make_base(before, source=str(path.resolve()), task_names=task, grid=_grid(own), file=path.resolve())
    return dataclasses.replace(found, transforms=own.transforms, transform_tensors=made)


def _grid(card: Card) -> tuple[int, int] | None:
    patch: Any = getattr(
        getattr(blank_model(card.model.name, card.model.kwargs), "patch_embed", None), "patch_size", None
    )
    return None if patch is None else (card.input.height // patch[0], card.input.width // patch[1])


def _versions() -> dict[str, str]:
    found = {}
    for key, name in (("torch", "torch"), ("timm", "timm"), ("peft", "peft"), ("vtk", "vit-toolkit")):
        try:
            found[key] = version(name)
        except PackageNotFoundError:
            found[key] = "unknown"
    return found
