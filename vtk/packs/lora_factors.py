"""Takes low-rank changes from LoRA layers as they are, for packs that store factors.

A LoRA layer's A and B are copied bit by bit, with α/r (rsLoRA: α/√r) as the scale. Some initialisations (PiSSA, OLoRA)
also subtract a product of rank r from the base's matrix: the two changes together are one of rank 2r. AdaLoRA's
singular values go into A, and those that it pruned go out. What is no such product, as DoRA's rows of another length,
convolutions and other tuners, is stored merged.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vtk.models.create import Created
from vtk.models.task_parameters import position_names
from vtk.packs.base_files import stored_tables
from vtk.packs.factors import FactorDtype, Factors
from vtk.packs.lora_adapter import Lora

_ROUNDING = 2e-6
"""Largest difference of two merges of one matrix in fp32, over its largest value."""


def run_factors(created: Created, lora: Lora, state: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Return the changes that a run made, by timm's names; none of matrices that are not in its base.

    Args:
        created: the run's model.
        lora: its layers.
        state: its state dict in training, in fp32 on the CPU.
    """
    found = {}
    for module in lora.modules:
        a, b = (state[name].detach().contiguous() for name in lora.factors(module))
        name, change = f"{module}.weight", Factors(a, b, lora.scaling)
        if _fits(change) and created.key_map.get(name) in created.base.hashes:
            found[name] = change
    return found and {**found, **unchanged_tables(created, state)}


def layer_factors(created: Created, wrapped: nn.Module) -> dict[str, Factors]:
    """Return the changes that an adapter makes, by timm's names; none of matrices that are not in its base.

    Args:
        created: the model without it.
        wrapped: PEFT's model with it, not merged.
    """
    found, start = {}, created.model.state_dict()
    for name, change, base in _products(wrapped):
        if created.key_map.get(name) in created.base.hashes and start[name].shape == base.shape == (
            len(change.b),
            change.a.shape[-1],
        ):
            change = _with_residual(change, base.detach() - start[name])
            if _fits(change):
                found[name] = change
    return found


def confirmed(created: Created, changes: Mapping[str, Factors], merged: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Return the changes that give what PEFT's own merge does, up to rounding: it may do more with a layer."""
    start = created.model.state_dict()
    return {
        name: change for name, change in changes.items()
        if (start[name] + change.change() - merged[name]).abs().max() <= _ROUNDING * merged[name].abs().max()
    }  # fmt: skip


def as_stored(factors: Mapping[str, Factors]) -> FactorDtype:
    """Return the smaller type that holds all factors without rounding: bf16 for an adapter that was saved in it."""
    both = [t for f in factors.values() for t in (f.a, f.b)]
    return "bf16" if both and all(torch.equal(t.bfloat16().to(t.dtype), t) for t in both) else "fp32"


def unchanged_tables(created: Created, state: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Return changes of rank 0 for the position tables that are still as created, so that a pack need not hold them.

    Only those that the stored copy of the base has just so: a table counts for no base's id.
    """
    kept = stored_tables(created.base)
    found = {}
    for name in position_names(created.model):
        start = created.initial[name]
        same = torch.equal(state[name].detach().cpu(), start.to(state[name].dtype))
        if same and created.key_map.get(name) in kept:
            found[name] = Factors(start.new_empty(0, start.shape[-1]), start.new_empty(start[..., 0].numel(), 0))
    return found


def _products(wrapped: nn.Module) -> Iterator[tuple[str, Factors, Tensor]]:
    """Yield the name of each matrix with a product of factors, the product, and the matrix below it."""
    from peft.tuners.adalora.layer import SVDLinear
    from peft.tuners.lora.layer import Linear, LoraLayer

    inner: Any = wrapped
    for path, layer in inner.base_model.model.named_modules():
        if not isinstance(layer, LoraLayer) or len(layer.active_adapters) != 1:
            continue
        (adapter,) = layer.active_adapters
        leaf = getattr(layer, "parameter_name", "weight")  # of a layer that LoraConfig.target_parameters names
        plain = type(layer) is Linear or hasattr(layer, "parameter_name")
        if adapter not in layer.lora_A:
            continue
        a, b, scale = layer.lora_A[adapter], layer.lora_B[adapter], layer.scaling[adapter]
        if isinstance(layer, SVDLinear):
            one = layer.lora_E[adapter].detach()
            left = one[:, 0] != 0
            change = Factors(
                (a.detach() * one)[left], b.detach()[:, left], scale / (float(layer.ranknum[adapter]) + 1e-5)
            )
        elif plain:
            change = Factors(a.weight.detach(), b.weight.detach(), scale)
        else:
            continue
        base = layer.get_base_layer()
        yield f"{path.replace('.base_layer', '')}.{leaf}", _contiguous(change), getattr(base, leaf)


def _contiguous(change: Factors) -> Factors:
    a, b = (t.float().clone(memory_format=torch.contiguous_format) for t in (change.a, change.b))
    if not bool(a.any()) and not bool(b.any()):
        a, b = a[:0], b[:, :0]
    return Factors(a, b, float(change.scale))


def _with_residual(change: Factors, residual: Tensor) -> Factors:
    """Return a change together with that which the initialisation made to the base's matrix, of the same rank."""
    if not bool(residual.any()):
        return change
    own = Factors.of(residual, change.rank)
    a, b = change.matrices()
    return Factors(torch.cat((a, own.a)), torch.cat((b * change.scale, own.b), dim=1))


def _fits(change: Factors) -> bool:
    """Return whether the rank is one that a matrix of this shape can have; above it the product is only larger."""
    return change.rank <= min(len(change.b), change.a.shape[-1])
