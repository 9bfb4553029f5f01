"""Loads the trained model that ``--distill-from`` names."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from vtk.card import Card, ModelSpec
from vtk.errors import DataError, UsageError
from vtk.files import existing_dir
from vtk.models.create import build_model
from vtk.models.inputs import blank_model
from vtk.models.weights.base import base_id, tensor_hash
from vtk.packs.cards import find_pack, is_pack
from vtk.packs.load import load_checkpoint, load_task

_CHECKPOINT = "model.safetensors"  # of `vtk train` and `vtk parallelize`, in the folder that they write


@dataclass(frozen=True)
class Trained:
    """A trained model and what it is.

    Attributes:
        model: plain timm.
        card: its input, and its classes in the order of its logits.
        name: as it was given.
        described: whether the card came with it; of a timm name the classes are mere numbers.
    """

    model: nn.Module
    card: Card
    name: str
    described: bool = True


def load_trained(text: str) -> Trained:
    """Load what ``--distill-from`` names: a pack, a run folder, a checkpoint with a card, or a timm name.

    Raises:
        UsageError: neither a file or folder nor a timm model, or a kind of file that holds no model.
        DataError: it is damaged, or the base of a pack was not found.
    """
    try:
        return _load(text)
    except DataError as error:
        raise type(error)(f"`--distill-from`: {error}") from error


def _load(text: str) -> Trained:
    path = Path(text).expanduser()
    folder = existing_dir(path)
    if folder.is_dir():
        if not is_pack(folder) and not is_pack(folder / "task") and (folder / _CHECKPOINT).is_file():
            task = load_checkpoint(folder / _CHECKPOINT)
        else:
            task = load_task(find_pack(folder))
        return Trained(task.model, task.card, text)
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UsageError(
                f"`--distill-from` {text}: a {path.suffix or 'file'} is no teacher; give a pack, a run folder, a "
                ".safetensors with a card, or a timm name"
            )
        task = load_checkpoint(path)
        return Trained(task.model, task.card, text)
    if path.suffix == ".safetensors" or path.is_absolute() or text.startswith(("./", "../", "~")):
        raise DataError(f"{text} does not exist")
    try:
        config = getattr(blank_model(text), "pretrained_cfg", None) or {}
    except UsageError as error:
        raise UsageError(f"`--distill-from` {text} is no file or folder here, and as a model name: {error}") from error
    count = int(config.get("num_classes") or 0)
    created = build_model(text, num_classes=count)
    card = Card(ModelSpec(text), created.input, tuple(map(str, range(count))))
    return Trained(created.model, card, text, described=False)


def trained_id(trained: Trained) -> str:
    """Return the sha256 of a model's weights and of all else that decides its outputs."""
    card = trained.card.to_dict()
    rest = json.dumps({key: card[key] for key in ("model", "input", "transforms", "classes")}, sort_keys=True)
    weights = base_id({name: tensor_hash(tensor) for name, tensor in trained.model.state_dict().items()})
    return hashlib.sha256(f"{weights}\n{rest}".encode()).hexdigest()
