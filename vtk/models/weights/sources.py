"""Reads base weights from a file, or makes random ones; `vtk.models.weights.hub` loads them from the hub."""

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vtk.card import Transform
from vtk.errors import DataError, UsageError
from vtk.models.positions import RELATIVE
from vtk.models.task_parameters import grid_of, head_names, position_names
from vtk.models.transforms.registry import apply_transforms
from vtk.models.weights import transformers
from vtk.models.weights.base import Base, make_base
from vtk.models.weights.class_names import read_names
from vtk.models.weights.files import read_weights, weights_file
from vtk.models.weights.npz import read_npz
from vtk.models.weights.rename import rename, stored_model
from vtk.models.weights.torch_file import NARROW

_MIN_MATCH = 0.9
_DEEP = ("blocks", "layers", "stages")


def read_base(
    name: str, kwargs: Mapping[str, Any], path: Path, *, absent: Collection[str] = ()
) -> tuple[Base, list[str]]:
    """Read a weights file as the base of a model, under timm's keys, in stored size and dtype.

    Args:
        name: timm model name.
        kwargs: arguments for timm.
        path: ``.safetensors``, a ``.pth``/``.pt``/``.bin`` that torch reads without unpickling code, an ``.npz``, or a
            folder that transformers wrote.
        absent: tensors that may be missing; those that transforms in the file's card remove may always be.

    Returns:
        The base, and notes for the user (ignored and missing tensors).

    Raises:
        DataError: unreadable file, or it has less than 90 % of the backbone's values.
    """
    path = weights_file(path)
    stored = read_npz(name, kwargs, path) if path.suffix == ".npz" else read_weights(path)
    foreign = stored.card is None and transformers.is_transformers(stored.tensors)
    if foreign:
        stored = dataclasses.replace(stored, tensors=transformers.rename(stored.tensors, path))
    raw, card = stored.tensors, stored.card
    names = read_names(path, card)
    reference, size = stored_model(name, kwargs, stored, len(names))
    if foreign:
        transformers.check_config(path, reference, name)
    transforms = tuple(card.transforms) if card else ()
    raw, new, gone = _undo_transforms(raw, transforms, reference, path)
    gone = gone | frozenset(absent)
    wanted = reference.state_dict()
    renamed, notes = rename(name, raw, reference, path, gone)
    tensors = {k: v for k, v in renamed.items() if k in wanted}
    _check_values(tensors, wanted, path)
    task = head_names(reference, tensors) | position_names(reference, tensors)
    own = head_names(reference) | position_names(reference)
    backbone = {k: v for k, v in wanted.items() if k not in own | gone}
    missing = [k for k, v in backbone.items() if k not in tensors or not _fits(k, tensors[k], v)]
    total = sum(v.numel() for v in backbone.values())
    matched = 1 - sum(backbone[k].numel() for k in missing) / max(total, 1)
    if matched < _MIN_MATCH:
        found = tuple(tensors[missing[0]].shape) if missing[0] in tensors else "absent"
        raise DataError(
            f"{path} has {100 * matched:.0f} % of the backbone of `{name}`, and at least 90 % must match; the first "
            f"mismatch is `{missing[0]}` (needed {tuple(backbone[missing[0]].shape)}, found {found}); is --model right?"
        )
    extra = [k for k in renamed if k not in wanted]
    if deep := [k for k in extra if k.split(".")[0] in _DEEP]:
        raise DataError(
            f"{path} has {len(deep)} tensors inside its blocks that `{name}` does not have, such as `{deep[0]}`; "
            "without them the result would differ; is --model right?"
        )
    if extra:
        count = f"{len(extra)} tensor{'s' if len(extra) > 1 else ''}"
        notes.append(f"ignored {count} of {path.name} that `{name}` does not have: {_some(extra)}")
    if missing:
        notes.append(f"{len(missing)} tensors are not in {path.name} and are randomly initialised: {_some(missing)}")
        tensors = {k: v for k, v in tensors.items() if k not in missing}
    file = path.resolve()
    base = make_base(
        tensors, source=str(file), task_names=task, grid=stored.grid if size is None else grid_of(reference), size=size,
        file=file,
    )  # fmt: skip
    return dataclasses.replace(base, transforms=transforms, transform_tensors=new, classes=names), notes


def random_base(model: nn.Module, seed: int, size: tuple[int, int] | None = None) -> Base:
    """Return the values of a newly initialised model as the base; ``size`` is its image size in pixels."""
    tensors = {k: v.detach().clone() for k, v in model.state_dict().items()}
    task = head_names(model) | position_names(model)
    return make_base(tensors, source=f"random:{seed}", task_names=task, grid=grid_of(model), size=size)


def _check_values(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], path: Path) -> None:
    """Refuse numbers that no weight can be: of another kind, without their scale, or not finite."""
    for name, value in tensors.items():
        if not wanted[name].is_floating_point():
            continue
        if not value.is_floating_point() or value.dtype in NARROW:
            raise DataError(f"{path}: `{name}` holds {value.dtype}, its model needs {wanted[name].dtype}")
        if not bool(value.float().isfinite().all()):
            raise DataError(f"{path}: `{name}` has values that are not finite; its training diverged")


def _fits(key: str, found: Tensor, needed: Tensor) -> bool:
    """Return whether shapes match; patch kernels and tables of relative positions are resampled and may differ."""
    if key.endswith("patch_embed.proj.weight") and found.ndim == needed.ndim == 4:
        return found.shape[:2] == needed.shape[:2]
    if key.endswith(f".{RELATIVE}") and found.ndim == needed.ndim == 2:
        return found.shape[1] == needed.shape[1]
    return found.shape == needed.shape


def _undo_transforms(
    raw: dict[str, Tensor], transforms: Sequence[Transform], reference: nn.Module, path: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor], frozenset[str]]:
    """Return a file's tensors under the keys from before its transforms, their new tensors, and removed keys."""
    if not transforms:
        return raw, {}, frozenset()
    model = copy.deepcopy(reference)
    try:
        keys = apply_transforms(model, transforms, {k: k for k in reference.state_dict()})
    except UsageError as error:
        raise DataError(f"{path} was made with `{transforms[-1].op}`, which does not fit --model: {error}") from error
    new = {k: v for k, v in raw.items() if keys.get(k, k) is None}
    for key, needed in model.state_dict().items():
        if keys[key] is None and (key not in new or new[key].shape != needed.shape):
            raise DataError(
                f"{path} lacks `{key}` of shape {tuple(needed.shape)}; is it complete, and is --model right?"
            )
    return {keys.get(k) or k: v for k, v in raw.items() if k not in new}, new, unused(keys, reference)


def unused(key_map: Mapping[str, str | None], model: nn.Module) -> frozenset[str]:
    """Return the tensors of a model that transforms removed, given their key map."""
    return frozenset(model.state_dict()) - frozenset(filter(None, key_map.values()))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
