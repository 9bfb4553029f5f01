"""Finds the base weights of a pack, and stores a copy: ``$VTK_HOME/bases/<id>.safetensors``."""

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from vtk import files, formats
from vtk.card import Card
from vtk.errors import BaseError, DataError, UsageError
from vtk.models.inputs import blank_model
from vtk.models.transforms.registry import apply_transforms
from vtk.models.weights.base import Base, tensor_hash
from vtk.models.weights.files import GRID, SIZE, read_safetensors
from vtk.models.weights.hub import hub_base
from vtk.models.weights.sources import read_base, unused

BUNDLED = "base.safetensors"
"""In a bundle: the tensors of the base that its pack needs, beside the files of the pack."""

Read = Callable[[], Base]
_LONGEST = 300
_OLD = 3600.0
"""Seconds after which a half-written base is deleted; the folder can be shared between machines."""


def stored_base(base_id: str) -> Path:
    """Return the path of the copy of a base. It is not a cache: packs need it."""
    return files.home() / "bases" / f"{base_id}.safetensors"


def store_base(base: Base) -> Path:
    """Store a copy of a base, at its stored dtype; one copy per id.

    Raises:
        DataError: the folder cannot be written.
    """
    path = stored_base(base.ref.id)
    if not path.exists():
        files.sweep(path.parent, lambda name: name.endswith(".safetensors"), age=_OLD)
        metadata = {"vtk_base": base.ref.id}
        if base.grid is not None:
            metadata[GRID] = f"{base.grid[0]}x{base.grid[1]}"
        if base.size is not None:
            metadata[SIZE] = f"{base.size[0]}x{base.size[1]}"
        with files.replace_file(path) as tmp:
            formats.save_tensors(tmp, base.tensors, metadata)
    return path


def stored_tables(base: Base) -> frozenset[str]:
    """Return the names of the base tensors outside its id that the stored copy has with the same values.

    Two files with one id can have other position tables, and the copy is of whichever came first.
    """
    path = stored_base(base.ref.id)
    if not path.is_file():
        return frozenset()
    tensors, _ = read_safetensors(path)
    own = base.tensors.keys() - base.hashes.keys()
    return frozenset(k for k in own & tensors.keys() if tensor_hash(tensors[k]) == tensor_hash(base.tensors[k]))


def base_keys(card: Card, where: str | Path) -> Callable[[str], str | None]:
    """Return the map from a tensor's name in the model to its name in the base, or to None if the base has none.

    Raises:
        DataError: the card's transforms do not fit its model; ``where`` names the card.
    """
    if not card.transforms:
        return lambda key: key
    return _key_map(card, where)[0].get


def _key_map(card: Card, where: str | Path) -> tuple[dict[str, str | None], nn.Module]:
    """Return the map from a card's model to the model before its transforms, and the latter without its values."""
    try:
        blank = blank_model(card.model.name, card.model.kwargs)
        model = copy.deepcopy(blank)
        with torch.device("meta"):
            return apply_transforms(model, card.transforms, {key: key for key in model.state_dict()}), blank
    except UsageError as error:
        raise DataError(f"the card of {where} fits no model: {error}") from error


def base_start(base: Base, keys: Callable[[str], str | None]) -> Callable[[str], Tensor | None]:
    """Return a function from a name in the model to the base's tensor.

    It gives None for position embeddings and classifiers, which belong to the task and have no hash in the base.
    """

    def start(name: str) -> Tensor | None:
        key = keys(name)
        return base.tensors.get(key) if key is not None and key in base.hashes else None

    return start


def bundled_base(
    folder: Path, card: Card, hashes: Mapping[str, str], needed: frozenset[str], starts: Mapping[str, str] | None = None
) -> Base:
    """Read the base tensors of a bundle; arguments as of `find_base`.

    Raises:
        BaseError: a tensor is absent, or differs from the one that the pack was trained on.
        DataError: the file is damaged.
    """
    assert card.base is not None
    path = folder / BUNDLED
    tensors, _ = read_safetensors(path)
    for key in sorted(needed):
        if key not in tensors or tensor_hash(tensors[key]) != {**hashes, **(starts or {})}.get(key):
            what = "differs from the recorded base" if key in tensors else "is absent"
            raise BaseError(f"{path}: `{key}` {what}; bundle the pack again (`vtk tasks bundle`), or give --base FILE")
    return Base(card.base, {k: v for k, v in tensors.items() if k in needed}, dict(hashes), file=path)


def find_base(
    card: Card, hashes: Mapping[str, str], needed: frozenset[str], given: Path | None = None,
    starts: Mapping[str, str] | None = None,
) -> Base:  # fmt: skip
    """Find base weights that fit a pack: ``given``, else the recorded path, ``$VTK_HOME``, the hub.

    Args:
        card: of the pack.
        hashes: sha256 of every base tensor when the pack was trained.
        needed: base keys that the pack does not hold.
        given: ``--base``; if it does not fit, no other place is tried.
        starts: sha256 of other base tensors, by base key, that factors of the pack start from.

    Raises:
        BaseError: none fits; the message names every place and the reason.
    """
    if card.base is None:
        raise BaseError("the pack's card names no base, so its model cannot be rebuilt; give a pack of `vtk finetune`")
    tried = []
    for place, read in _places(card, given):
        try:
            base = read()
        except OSError as error:  # a card can name what is no path at all
            tried.append(f"{place}: {error.strerror or error}")
            continue
        except (DataError, UsageError) as error:
            where, _, reason = str(error).partition(": ")
            tried.append(f"{place}: {reason if where in place else error}")
            continue
        wanted = {**hashes, **(starts or {})}
        wrong = next((k for k in sorted(needed) if k not in wanted or _hash(base, k) != wanted[k]), None)
        if wrong is None:
            return base
        differs = f"`{wrong}` differs" if wrong in base.tensors else f"`{wrong}` is absent"
        tried.append(f"{place}: is base {base.ref.id[:12]}, the pack needs {card.base.id[:12]} ({differs})")
    if given is not None:
        raise BaseError(f"`--base` {tried[0]}")
    raise BaseError(f"no base {card.base.id[:12]} for this pack; tried {'; '.join(tried)}; give --base FILE")


def _hash(base: Base, key: str) -> str | None:
    if key in base.hashes or key not in base.tensors:
        return base.hashes.get(key)
    return tensor_hash(base.tensors[key])  # of a position table, which counts for no base


def _places(card: Card, given: Path | None) -> Iterator[tuple[str, Read]]:
    assert card.base is not None
    name, kwargs, source = card.model.name, card.model.kwargs, card.base.source
    # what the transforms take away, such as a stem that they replace, may never have been in the base
    absent = unused(*_key_map(card, "the pack")) if card.transforms else frozenset()

    def file(path: Path) -> Read:
        return lambda: read_base(name, kwargs, path, absent=absent)[0]

    if given is not None:
        yield str(given), file(given)
        return
    recorded = None if source.startswith(("hub:", "random:")) else Path(source)
    if recorded is not None:
        yield f"the recorded path {_short(source)}", file(recorded)
    copy = stored_base(card.base.id)
    yield f"$VTK_HOME ({copy})", file(copy)
    if source.startswith("hub:"):
        yield "the hub", lambda: hub_base(name, kwargs)
    else:
        yield "the hub", _not_on_hub


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _not_on_hub() -> Base:
    raise BaseError("these weights were not loaded from there")
