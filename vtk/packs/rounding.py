"""Rounds the tensors and factors of a pack to the precision they are stored in, and measures what that changes."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vtk.card import InputSpec
from vtk.errors import UsageError
from vtk.models.create import Created
from vtk.models.devices import DTYPES
from vtk.models.weights.base import Base, tensor_hash
from vtk.packs import int8
from vtk.packs.config import PackDtype
from vtk.packs.factors import Factors, card_facts


def store(
    tensors: Mapping[str, Tensor],
    dtype: PackDtype,
    *,
    trained: Collection[str],
    start: Callable[[str], Tensor | None],
    model: Callable[[], nn.Module],
    spec: InputSpec,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Round a pack's tensors to the stored precision.

    Args:
        tensors: of the pack, at full precision.
        dtype: of the stored tensors.
        trained: keys that training changed on purpose.
        start: name in the model to the base's tensor, or None.
        model: returns the whole model, to measure the rounding error of int8.
        spec: the model's input.

    Returns:
        The tensors of the file, and the card's ``pack``.
    """
    facts: dict[str, Any] = {"dtype": dtype, "trained": sorted(trained)}
    if dtype == "int8":
        stored = int8.quantise(tensors, trained, start)
        facts["drift"] = int8.drift(model(), tensors, int8.expand(stored, start, "the pack"), spec)
    else:
        stored = {k: to_dtype(v, DTYPES[dtype]) for k, v in tensors.items()}
    facts["tensors_bytes"] = sum(v.numel() * v.element_size() for v in stored.values())
    return stored, facts


def store_factors(
    tensors: Mapping[str, Tensor],
    dtype: PackDtype,
    factors: Mapping[str, Factors],
    *,
    trained: Collection[str],
    starts: Mapping[str, str],
    spec: InputSpec,
    model: Callable[[], nn.Module] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Round a pack's factors to the stored precision; its other tensors stay exact.

    Args:
        tensors: of the pack, at full precision; those that ``factors`` replace are left out.
        dtype: of the stored factors.
        factors: changes of matrices, by name.
        trained: keys that training changed on purpose.
        starts: of `start_hashes`.
        spec: the model's input.
        model: returns the whole model with ``factors`` merged, to measure the rounding error where there is any; by
            default nothing is measured.

    Returns:
        The tensors of the file, and the card's ``pack``.
    """
    exact = {k: to_dtype(v, torch.float32) for k, v in tensors.items() if k not in factors}
    typed = {name: f.to(dtype) for name, f in factors.items()}
    stored = {**exact, **{k: v for name, f in typed.items() for k, v in f.tensors(name).items()}}
    facts: dict[str, Any] = {"dtype": dtype, "trained": sorted(trained), "factors": card_facts(typed, starts)}
    if model is not None and (errors := _errors(factors, typed)):
        whole = model()
        state = {name: whole.state_dict()[name].clone() for name in errors}
        rounded = {name: value + errors[name].reshape(value.shape) for name, value in state.items()}
        facts["drift"] = int8.drift(whole, state, rounded, spec)
    facts["tensors_bytes"] = sum(v.numel() * v.element_size() for v in stored.values())
    return stored, facts


def _errors(factors: Mapping[str, Factors], typed: Mapping[str, Factors]) -> dict[str, Tensor]:
    """Return by how much rounding moved the changes that it moved at all."""
    found = {name: typed[name].change() - f.change() for name, f in factors.items() if f.rank}
    return {name: error for name, error in found.items() if bool(error.any())}


def start_hashes(factors: Collection[str], created: Created) -> dict[str, str]:
    """Return the sha256 of the base's tensors that factors start from and the base's id leaves out, by name."""
    keys = {name: created.key_map.get(name) for name in factors}
    return {
        name: tensor_hash(created.base.tensors[key])
        for name, key in keys.items() if key is not None and key not in created.base.hashes
    }  # fmt: skip


def start_layout(base: Base) -> dict[str, list[int]]:
    """Return what is known of the layout of the base's position table, for `vtk.packs.factor_facts.read_layout`."""
    return {name: list(pair) for name, pair in (("grid", base.grid), ("size", base.size)) if pair is not None}


def check_factors(factors: Mapping[str, Factors], created: Created, state: Mapping[str, Tensor]) -> None:
    """Refuse factors that a pack cannot hold.

    Args:
        factors: by the names of the matrices.
        created: the model as created; training may have changed its modules.
        state: the trained model's, with plain timm keys.

    Raises:
        UsageError: of no matrix of the model, of another shape, or of one that does not start from the base.
    """
    for name, change in factors.items():
        value = state.get(name)
        if value is None or value.ndim < 2 or not value.is_floating_point():
            what = "none" if value is None else f"{value.dtype} of shape {tuple(value.shape)}"
            raise UsageError(f"`factors` has `{name}`, and the model has {what} there; give factors of its matrices")
        if created.key_map.get(name) is None:
            raise UsageError(
                f"`factors` has `{name}`, which the base does not have, so that its change would be from random "
                "numbers; leave it out, and it is stored whole"
            )
        shape, found = (value[..., 0].numel(), value.shape[-1]), (len(change.b), change.a.shape[-1])
        if change.rank and (found != shape or change.rank > max(shape)):
            raise UsageError(f"`factors` has a matrix {found} of rank {change.rank} for `{name}`, which is {shape}")


def to_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous copy on the CPU; only floating types are converted."""
    value = tensor.detach().cpu()
    if value.is_floating_point():
        value = value.to(dtype)
    return value.clone(memory_format=torch.contiguous_format)
