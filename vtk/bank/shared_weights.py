"""The weights that all tasks of a bank share, and the check that a pack does not change them."""

import copy
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vtk.bank.architectures import ALONE as _ALONE
from vtk.bank.architectures import check_architecture, own_keys, without_blocks
from vtk.bank.folded import Folded
from vtk.card import BaseRef, Card, Transform
from vtk.errors import BaseError, DataError, UsageError
from vtk.models.packed.forward import attention_modules
from vtk.models.weights.base import tensor_hash
from vtk.packs.base_files import base_keys
from vtk.packs.factors import PackTensors
from vtk.packs.load import Task

NUMBERS = itertools.count(1)
"""Numbers of attention weights, unique in a process."""


@dataclass(frozen=True)
class Shared:
    """The part of a model that all tasks of a bank share.

    Attributes:
        model: timm's, on the bank's device; what belongs to a task is on the meta device and holds no memory.
        card: of the pack it was first read from.
        base: the weights the packs were trained on.
        hashes: sha256 of every tensor in it that packs must agree on.
        folded: norms, FFNs and the ends, where the bank is folded; ``model`` then holds only what it needs beside it.
        number: of the base's own attention weights, which packs that trained none share.
    """

    model: Any
    card: Card
    base: BaseRef
    hashes: Mapping[str, str]
    folded: Folded | None = None
    number: int = field(default_factory=NUMBERS.__next__)

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers that hold memory."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor for name, tensor in named if not tensor.is_meta}

    def held(self) -> list[Tensor]:
        """Return all tensors that hold memory, folded ones too."""
        return [*self.tensors().values(), *([] if self.folded is None else self.folded.tensors())]

    def fits(self, task: Task) -> bool:
        """Return whether `check` lets a task pass."""
        try:
            self.check(task)
        except (UsageError, BaseError):
            return False
        return True

    def check(self, task: Task) -> None:
        """Refuse a task that does not fit this bank.

        Raises:
            UsageError: another architecture, or other shared tensors.
            BaseError: they differ because the pack is of another base.
        """
        card, own = task.card, self.card
        if (card.model.name, card.model.kwargs) != (own.model.name, own.model.kwargs):
            raise UsageError(f"{task.path} is a {_call(card)}, this bank holds a {_call(own)}; {_ALONE}")
        if card.transforms != own.transforms:
            raise UsageError(
                f"{task.path} was made with {_ops(card.transforms)}, this bank's tasks with {_ops(own.transforms)}; "
                f"{_ALONE}"
            )
        for key, found in shared_hashes(task).items():
            if self.hashes[key] == found:
                continue
            ref = _base(task)
            if ref.id != self.base.id and key not in task.carried:
                raise BaseError(
                    f"{task.path} is of base {ref.id[:12]}, this bank of {self.base.id[:12]} (`{key}` differs); "
                    f"{_ALONE}"
                )
            raise _differs(task.path, key, "this bank's tasks")

    def check_factors(self, pack: PackTensors, own: Collection[str]) -> None:
        """Refuse a pack of factors, of the bank's own model and base, that changed a shared tensor.

        Args:
            pack: to check.
            own: names that belong to a task.

        Raises:
            UsageError: names the first one.
        """
        for key in sorted({*pack.dense, *pack.factors} - set(own)):
            change = pack.factors.get(key)
            if change.rank if change is not None else tensor_hash(pack.dense[key]) != self.hashes.get(key):
                raise _differs(pack.path, key, "this bank's tasks")


def build(task: Task, device: torch.device, dtype: torch.dtype, folded: Folded | None = None) -> Shared:
    """Return the shared part of a bank's first task.

    Args:
        task: the first; its model is not changed.
        device: of the bank.
        dtype: of the bank.
        folded: its folded shared part, which is moved to the device; None for a bank that is not fused.

    Raises:
        UsageError: shared tensors differ from the base's.
    """
    hashes, model = shared_hashes(task), copy.deepcopy(task.model)
    own, keep = own_keys(model) | _attention_buffers(model), {}
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if folded is not None and key.startswith("blocks."):
            continue  # they are in ``folded``
        keep[key] = tensor.detach().to("meta") if key in own else _move(tensor, device, dtype)
    replace_tensors(model, keep)
    blocks = model.blocks
    without_blocks(model)
    if folded is None:
        model.blocks = blocks
    else:
        model = model if folded.stem is None or folded.pooling is None else nn.Module()
        folded = folded.to(device, dtype)
    return Shared(model.eval(), task.card, _base(task), hashes, folded)


def check_structure(task: Task) -> None:
    """Refuse a model that a bank cannot run, and a pack whose shared tensors are not the base's.

    Raises:
        UsageError: another architecture or an unknown part, by name; or a shared tensor that was changed.
        DataError: NaN or infinity among the pack's tensors.
    """
    model: Any = task.model
    check_architecture(model, task.path)
    state = model.state_dict()
    for key in sorted(task.carried):
        if state[key].is_floating_point() and not bool(torch.isfinite(state[key]).all()):
            raise DataError(f"{task.path}: `{key}` holds NaN or infinity; train it again, or use an earlier pack")
    base = task.base
    if base is None:
        raise DataError(f"{task.path} names no base; a bank takes packs, not merged checkpoints")
    keys = base_keys(task.card, task.path)
    for key in sorted(task.carried - own_keys(model)):
        source = keys(key) or ""
        # a stem resampled to another patch has no counterpart of its shape; tasks are then compared with each other
        same_shape = source in base.tensors and base.tensors[source].shape == state[key].shape
        if same_shape and tensor_hash(state[key]) != base.hashes.get(source):
            raise _differs(task.path, key, "the base")


def shared_hashes(task: Task) -> dict[str, str]:
    """Return the sha256 of every shared tensor."""
    own = own_keys(task.model)
    return {key: tensor_hash(value) for key, value in task.model.state_dict().items() if key not in own}


def replace_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace a model's parameters and buffers in place; parameters get no gradient."""
    for prefix, module in model.named_modules():
        for group in (module._parameters, module._buffers):
            for name, value in group.items():
                key = f"{prefix}.{name}".removeprefix(".")
                if value is None or key not in tensors:
                    continue
                new = tensors[key]
                group[name] = nn.Parameter(new, False) if group is module._parameters else new  # type: ignore[assignment]


def _attention_buffers(model: Any) -> frozenset[str]:
    """Return the keys of attentions' buffers, which only the module's own forward pass reads."""
    modules = attention_modules(model.blocks)
    return frozenset(f"{name}.{key}" for name, attn in modules for key, _ in attn.named_buffers())


def _move(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to(device, dtype if tensor.is_floating_point() else None)


def _base(task: Task) -> BaseRef:
    assert task.card.base is not None
    return task.card.base


def _differs(path: Path, key: str, other: str) -> UsageError:
    return UsageError(
        f"{path} changed `{key}`, which all tasks of a bank share: it differs from that of {other}; {_ALONE}, or "
        "train with --attn-only or --train head"
    )


def _call(card: Card) -> str:
    return " ".join([card.model.name, *(f"{k}={v}" for k, v in card.model.kwargs.items())])


def _ops(transforms: tuple[Transform, ...]) -> str:
    named = (f"{t.op}({', '.join(f'{k}={v}' for k, v in t.args.items())})" for t in transforms)
    return " and ".join(named) or "no transform"
