"""``--train lora``: PEFT's layers in place of linear ones in training, and merged for evaluation.

The factors, the classifier and what a transform made are trained; the position table is not. An adapter of PEFT holds
modules, and the table is a parameter of the whole model: with a trained table the adapter would not be the whole task.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vtk import console
from vtk.card import Card, InputSpec, ModelSpec, Transform
from vtk.data.loading.samplers import mix
from vtk.errors import UsageError
from vtk.models.create import Created
from vtk.models.task_parameters import head_names
from vtk.packs.adapters import called_leaves, exact_pattern, import_peft, timm_call
from vtk.packs.lora_adapter import Lora
from vtk.packs.plain import separate_qkv_bias
from vtk.training.options.policy import PolicyOptions
from vtk.training.policies import policy

_APART = {"qkv": ("q_proj", "k_proj", "v_proj"), "fc1": ("fc1_g", "fc1_x")}
"""Layers of EVA-02 and others in place of one matrix."""


def inject(created: Created, options: PolicyOptions, new: Collection[str], *, seed: int) -> Lora:
    """Put PEFT's LoRA layers into a model, in place.

    Args:
        created: its model is changed; B is zero.
        options: rank, α, dropout and targets.
        new: tensors that a transform made.
        seed: of the random numbers in A.

    Raises:
        UnavailableError: PEFT is not installed.
        UsageError: a target is not there or cannot have factors, or the model has something that timm cannot build.
    """
    peft, model = import_peft(), created.model
    refuse_own(created.spec, created.input, created.transforms)
    separate_qkv_bias(model)
    called = called_leaves(model, created.input)
    modules = target_modules(model, options.lora_targets, called)
    whole = tuple(sorted({name.rpartition(".")[0] for name in {*head_names(model), *new}}))
    _check_whole(model, whole, called)
    names = [name for name, _ in model.named_modules() if name]
    lora = Lora(
        options.lora_rank, options.lora_alpha, options.lora_dropout, modules, whole, exact_pattern(list(modules), names)
    )
    training = model.training
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(seed, 1))
        peft.inject_adapter_in_model(lora.config(inference=False), model)
    model.train(training)
    return lora


def refuse_own(spec: ModelSpec, image: InputSpec, transforms: Sequence[Transform]) -> None:
    """Refuse a model that plain timm cannot build: PEFT could not use its adapter.

    Args:
        spec: name and arguments of the model.
        image: its input.
        transforms: its changes, of the options and of the weights.

    Raises:
        UsageError: names the model or the change.
    """
    try:
        timm_call(Card(spec, image, ("class",), transforms=tuple(transforms)))
    except UsageError as error:
        raise UsageError(f"`--train lora`: {str(error).partition(';')[0]}; use --train attn") from error


def target_modules(model: nn.Module, targets: Collection[str], called: Collection[str]) -> tuple[str, ...]:
    """Return the linear layers whose names end in one of ``targets``; none of the classifier's.

    In models that have them apart, ``qkv`` stands for ``q_proj``, ``k_proj`` and ``v_proj``, and ``fc1`` for ``fc1_g``
    and ``fc1_x``.

    Raises:
        UsageError: no layer has such a name, or the model reads its weight without calling it.
    """
    heads = {name.rpartition(".")[0] for name in head_names(model)}
    linear = [n for n, m in model.named_modules() if type(m) is nn.Linear and n not in heads]
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    targets = [leaf for t in targets for leaf in ((t,) if t in leaves else _apart(t, leaves))]
    if missing := next((t for t in targets if t not in leaves), None):
        there = f"there are {', '.join(leaves)}" if leaves else "it has no linear layers but the classifier"
        raise UsageError(
            f"`--lora-targets` {missing}: {type(model).__name__} has no linear layer of that name; {there}"
        )
    chosen = tuple(name for name in linear if name.rpartition(".")[2] in targets)
    if silent := next((name for name in chosen if name not in called), None):
        raise UsageError(
            f"`--lora-targets`: {type(model).__name__} reads the weight of {silent} without calling it, so factors "
            "would have no effect; use --train attn, or other targets"
        )
    return chosen


def _apart(target: str, leaves: Collection[str]) -> tuple[str, ...]:
    """Return the layers of a model that hold the rows of ``target`` apart; the name itself where there are none."""
    parts = _APART.get(target, ())
    return parts if parts and all(part in leaves for part in parts) else (target,)


def warn_of_shared(model: nn.Module, lora: Lora) -> None:
    """Warn if LoRA changes weights outside of attention, which tasks could no longer share."""
    groups = policy.group_names(model)
    outside = [name for name in lora.modules if groups[f"{name}.base_layer.weight"] != "attention"]
    if outside:
        console.warn(
            f"--lora-targets: the pack changes layers outside of attention ({outside[0]}, {len(outside)} in all), "
            "which a TaskBank shares between tasks; it will refuse this pack"
        )


@contextlib.contextmanager
def merged_into(model: nn.Module, lora: Lora, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Return a context in which ``model`` computes what its pack will compute.

    The plain layers are put back and hold the merged weights, rounded to the type they are stored in: in bf16
    W · x + B · (A · x) and (W + B · A) · x differ, and others measure the latter.

    Args:
        model: in training form, on any device.
        lora: its layers.
        state: its state dict in fp32 on the CPU.
    """
    merged = lora.merge(state)
    with contextlib.ExitStack() as stack, torch.no_grad():
        for name in lora.modules:
            parent, _, leaf = name.rpartition(".")
            owner, layer = model.get_submodule(parent), model.get_submodule(name)
            base: Any = layer.base_layer
            stack.callback(setattr, owner, leaf, layer)
            stack.callback(setattr, base.weight, "data", base.weight.data)
            base.weight.data = merged[f"{name}.weight"].to(base.weight.device, base.weight.dtype)
            setattr(owner, leaf, base)
        yield


def shared_names(created: Created, start: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of ``start`` that the base's own file has, under that name and with those values."""
    own = created.base.tensors
    return frozenset(
        name for name, value in start.items()
        if name in own and own[name].shape == value.shape and torch.equal(own[name].to(value.dtype), value)
    )  # fmt: skip


def _check_whole(model: nn.Module, whole: tuple[str, ...], called: Collection[str]) -> None:
    """Refuse modules that PEFT's ``modules_to_save`` cannot hold: it matches ends of names, and calls modules."""
    for name in whole:
        if not name or name not in called:
            raise UsageError(
                f"`--train lora`: {type(model).__name__} does not call {name or 'a trained tensor'} as a module, so an "
                "adapter of PEFT cannot hold it; use --train attn"
            )
        others = [n for n, _ in model.named_modules() if n.endswith(name) and n not in whole]
        if others:
            raise UsageError(
                f"`--train lora`: PEFT would take {others[0]} for {name}, whose name it ends in; use --train attn"
            )
