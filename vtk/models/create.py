"""Builds a timm model by name, at any size, with base weights."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from timm.layers import resample_patch_embed
from timm.models.naflexvit import NaFlexVit
from torch import Tensor, nn

from vtk.card import InitName, InputSpec, ModelSpec, Transform
from vtk.errors import DataError, UsageError, VtkError
from vtk.models import parallel_models as parallel
from vtk.models.alternet.window_attention import windows_fault
from vtk.models.initialization.draw import decided_kinds, initial_weights
from vtk.models.inputs import Size, blank_model, check_size, input_spec, model_error
from vtk.models.positions import RELATIVE, describe_resampling, fit_position, fit_relative
from vtk.models.stems.own import without_own_stem
from vtk.models.task_parameters import head_names, position_names
from vtk.models.transform_order import describe_changes, order_changes, unchanged
from vtk.models.transforms.registry import apply_transforms
from vtk.models.weights.base import Base
from vtk.models.weights.class_names import describe_rows, match_rows, pick_rows
from vtk.models.weights.hub import hub_base
from vtk.models.weights.sources import random_base, read_base


@dataclass
class Created:
    """A model and the origin of its tensors.

    Attributes:
        model: fp32, on the CPU, in train mode.
        spec: name and timm arguments, from which it can be rebuilt.
        base: the shared weights.
        input: preprocessing.
        transforms: applied after the base was loaded.
        key_map: state-dict key → key of the base; None for a tensor that the base does not have.
        initial: copies (floating types as fp32) of every tensor that differs from the base: position table, classifier,
            resampled and new tensors.
        notes: for the user, about loading.
        init: scheme of the initial weights of layers that are not timm's (`vtk.models.initialization`).
        decided: kinds of layers that start from weights which depend on the scheme.
        brought: tensors of transforms that the base's file already has, for example a stem; like the base, they need
            not be trained.
    """

    model: nn.Module
    spec: ModelSpec
    base: Base
    input: InputSpec
    transforms: tuple[Transform, ...]
    key_map: dict[str, str | None]
    initial: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)
    brought: frozenset[str] = frozenset()
    init: InitName = "papers"
    decided: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Created":
        """Copy with the model; the base, which is immutable, is shared."""
        new = copy.copy(self)
        memo[id(self)] = new
        new.model, new.key_map = copy.deepcopy(self.model, memo), dict(self.key_map)
        new.initial, new.notes = dict(self.initial), list(self.notes)
        return new


def facts_of(model: nn.Module) -> Created | None:
    """Return the `Created` of a model from `vtk.create_model`; None for other models."""
    found = vars(model).get("created")
    return found if isinstance(found, Created) else None


def build_model(
    name: str,
    *,
    num_classes: int,
    classes: Sequence[str] = (),
    base: Base | None = None,
    weights: Path | None = None,
    pretrained: bool = True,
    transforms: Sequence[Transform] = (),
    kwargs: Mapping[str, Any] | None = None,
    input: InputSpec | None = None,
    img_size: Size = None,
    in_chans: int = 3,
    drop_path_rate: float = 0.0,
    seed: int = 0,
    init: InitName = "papers",
) -> Created:
    """Build a timm model for a task, with base weights; other arguments as for `vtk.create_model`.

    Args:
        name: timm model name, or a parallel model's: ``vit_{tiny,small,base,large}_patch16_{N}x{P}_224``.
        num_classes: classes of the task; a classifier of another size is replaced.
        classes: names of the task's classes. If those of the weights are known, classifier rows are matched by name,
            and a classifier that lacks a name is replaced.
        init: scheme of the initial weights.

    Raises:
        UsageError: unknown name, unsupported size or arguments.
        DataError: unreadable weights, or weights that do not fit.
    """
    own = dict(kwargs or {})
    size = check_size(name, img_size, own)
    with initial_weights(init) as drawn:
        model = _build(name, own, num_classes, size, drop_path_rate, seed)
    if isinstance(model, NaFlexVit):  # nothing else of it says for which size it was built
        config = dict(getattr(model, "pretrained_cfg", None) or {})
        model.pretrained_cfg = {**config, "input_size": (in_chans, *size)}
    notes: list[str] = []
    if base is None:
        if weights is not None:
            base, notes = read_base(name, own, weights)
        elif pretrained:
            base = hub_base(name, own)
        else:
            base = random_base(model, seed, size)
            notes.append("no pretrained weights: the base is random numbers")
    key_map = _load(model, name, base, size, notes, classes)
    if all(change.op != "replace_stem" for change in base.transforms):  # else it contradicts the file
        transforms = without_own_stem(model, transforms)
    before, after = order_changes(base, transforms, in_chans)
    # as in `_build`: a new stem depends only on the seed
    with torch.random.fork_rng(devices=[]), initial_weights(init) as changed:
        torch.manual_seed(seed)
        key_map = apply_transforms(model, before, key_map)
        model.load_state_dict(
            {k: v for k, v in base.transform_tensors.items() if key_map.get(k, k) is None}, strict=False
        )
        key_map = apply_transforms(model, after, key_map)
    notes += describe_changes(base, (before, after), transforms, model, key_map)
    state = model.state_dict()
    task = head_names(model) | position_names(model)
    initial = {
        k: (v.detach().float() if v.is_floating_point() else v.detach()).clone()
        for k, v in state.items()
        if k in task or key_map.get(k) is None or v.shape != base.tensors[key_map[k]].shape  # type: ignore[index]
    }
    spec = input or input_spec(name, own, size, in_chans)
    brought = unchanged(base, state)
    fresh = {k for k in state if key_map.get(k) is None or base.ref.source.startswith("random:")} - brought
    decided = decided_kinds([*drawn, *changed], [t for k, t in model.state_dict(keep_vars=True).items() if k in fresh])
    facts = ModelSpec(name, own), base, spec, (*before, *after), key_map, initial, notes, brought, init, decided
    return Created(model, *facts)


def check_transforms(
    name: str, transforms: Sequence[Transform], kwargs: Mapping[str, Any] | None = None,
    size: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Refuse transforms that do not fit a model, before data or weights are read.

    Raises:
        UsageError: unknown name, a transform that the model does not support, or an unsupported image size.
    """
    model = blank_model(name, kwargs)
    transforms = without_own_stem(model, transforms)
    if transforms:
        model = copy.deepcopy(model)
        apply_transforms(model, transforms, {key: key for key in model.state_dict()})
    if size is not None and (fault := windows_fault(model, size)):
        raise UsageError(f"`--img-size` {size[0]} {size[1]}: {fault}")


def _build(
    name: str, kwargs: Mapping[str, Any], num_classes: int, size: tuple[int, int], drop_path_rate: float, seed: int
) -> nn.Module:
    arguments = {**kwargs, "num_classes": num_classes, "img_size": size}
    if drop_path_rate:
        arguments["drop_path_rate"] = drop_path_rate
    with torch.random.fork_rng(devices=[]):  # building a model must not advance the caller's generator
        torch.manual_seed(seed)
        try:
            return parallel.build(name, **arguments)
        except TypeError as error:
            if "img_size" not in str(error):
                raise model_error(name, kwargs, error) from error
            arguments.pop("img_size")  # convolutional networks take any size
            torch.manual_seed(seed)
            return parallel.build(name, **arguments)
        except VtkError:
            raise
        except Exception as error:  # as in `blank_model`
            raise model_error(name, {**kwargs, "img_size": size}, error) from error


def _load(
    model: nn.Module, name: str, base: Base, size: tuple[int, int], notes: list[str], classes: Sequence[str]
) -> dict[str, str | None]:
    """Copy the base into the model, resampling size-dependent tensors, and return the key map."""
    state = model.state_dict()
    heads, positions = head_names(model), position_names(model)
    key_map: dict[str, str | None] = {k: k if k in base.tensors else None for k in state}
    parameters = {name for name, _ in model.named_parameters()}
    filled: dict[str, Tensor] = {}
    named = bool(classes and base.classes) and tuple(classes) != base.classes
    rows = match_rows(base.classes, classes) if named else None
    for key, target in state.items():
        source = base.tensors.get(key)
        if source is None:
            continue
        value = source.to(torch.float32) if source.is_floating_point() else source
        if key in heads:
            own = pick_rows(value, base.classes, rows) if named and target.shape[:1] == (len(classes),) else value
            if own is None or own.shape != target.shape:
                key_map[key] = None
                continue
            if own is not value:
                key_map[key], value = None, own
        elif key in positions:
            if key in parameters:
                value = fit_position(key, value, model, grid=base.grid, size=base.size, name=name)
            if not torch.equal(value, source):
                notes.append(describe_resampling(key, source, value, model, base.grid, base.size))
        elif key.endswith(f".{RELATIVE}"):
            value = fit_relative(key, value, model, base.grid)
        elif value.shape != target.shape and key.endswith("patch_embed.proj.weight") and value.ndim == 4:
            value = resample_patch_embed(value, list(target.shape[-2:]))
            notes.append(f"patch embedding resampled from {tuple(source.shape[-2:])} to {tuple(target.shape[-2:])}")
        if value.shape != target.shape and base.size not in (None, size):
            (h, w), sides = base.size, " ".join(map(str, base.size))  # type: ignore[misc]
            raise UsageError(
                f"`--img-size` {size[0]} {size[1]}: `{key}` of `{name}` depends on the size of the images, and its "
                f"weights are for {h}×{w} px; use --img-size {sides}"
            )
        if value.shape != target.shape:
            raise DataError(
                f"`{key}` of the base has shape {tuple(source.shape)}, `{name}` needs {tuple(target.shape)}; "
                "do --model and its arguments belong to these weights?"
            )
        filled[key] = value
    missing = sorted(k.rpartition(".")[0] for k in heads if k not in filled and k.endswith("weight"))
    if named and not (rows and missing) and (note := describe_rows(base.classes, classes)):
        notes.append(f"base weights: {note}")
    elif missing:
        known = {k: base.tensors[f"{k}.weight"].shape[0] for k in missing if f"{k}.weight" in base.tensors}
        new = state[f"{missing[0]}.weight"].shape[0]
        what = f"the weights' {next(iter(known.values()))} classes" if known else "the weights have no classifier"
        notes.append(f"new classifier `{missing[0]}` for {new} classes ({what})")
    model.load_state_dict(filled, strict=False)
    return key_map
