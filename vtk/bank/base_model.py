"""The base as a model of one image size, kept so that a pack of factors is added without building a model.

Matrices of attention are not in it: the bank has those. What is left (stem, positions, norm, head, small tensors of
attention) takes a few megabytes, on the CPU in fp32.
"""

import copy
import dataclasses
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vtk.bank.architectures import SEEN_BY_ATTENTION, own_keys, without_blocks
from vtk.bank.plain_changes import Module
from vtk.bank.positions import TaskPositions, read_positions
from vtk.bank.shared_weights import replace_tensors
from vtk.card import Card
from vtk.errors import BaseError
from vtk.fused.families import Reader
from vtk.models.packed.forward import attention_modules
from vtk.models.positions import RELATIVE
from vtk.models.task_parameters import head_names, position_names
from vtk.models.weights.base import Base, base_id, tensor_hash
from vtk.packs.base_files import base_keys
from vtk.packs.factor_facts import read_layout
from vtk.packs.factors import PackTensors, check_matrix
from vtk.packs.load import Task, base_needs, build_from_card, check_complete, full_precision, start_base


@dataclass(frozen=True, eq=False)
class BaseModel:
    """The base as a model of one image size.

    Attributes:
        card: of the pack that it was first needed for; its model, transforms and input are those of all tasks of it.
        base: hashes of the base; without tensors.
        has: names of the tensors that were there, of a bundle fewer than the base has.
        keys: name in the model to name in the base.
        starts: sha256 of the tensors of the base that have none in ``base``, such as position tables.
        end: the model without blocks, in fp32; values of tasks are the base's.
        state: every tensor of the model by name, on the meta device.
        required: names that the base cannot supply.
        own: names that belong to a task.
        modules: attention modules, in the order of `attention_modules`.
        positions: rotary tables and biases.
        reader: of the family, where the bank is folded.
        table: (N, C), the base's embedding table on the bank's device, where it has one.
        pos_embed: (N, C), its position table likewise, where tasks embed their own images.
    """

    card: Card
    base: Base
    has: frozenset[str]
    keys: Callable[[str], str | None]
    starts: Mapping[str, str]
    end: Any
    state: Mapping[str, Tensor]
    required: frozenset[str]
    own: frozenset[str]
    modules: tuple[Module, ...]
    positions: TaskPositions
    reader: Reader | None = None
    table: Tensor | None = None
    pos_embed: Tensor | None = None

    @classmethod
    def of(cls, task: Task, dtype: torch.dtype) -> tuple["BaseModel", Task]:
        """Build the base's model of a task, and return it also as a `Task` that changes nothing.

        Args:
            task: loaded, with a base.
            dtype: of the bank.
        """
        assert task.base is not None
        found = start_base(task.base, task.card, task.path)
        created = build_from_card(task.card, base=found)
        model: Any = created.model.eval()
        own, given = own_keys(model), task.model.state_dict()
        # tensors of transforms, or of a stem for another patch, which all packs of this bank have alike
        model.load_state_dict({k: given[k] for k in created.initial if k not in own}, strict=False)
        modules = tuple(Module.of(name, attn) for name, attn in attention_modules(model.blocks))
        state = {k: torch.empty_like(t, device="meta") for k, t in model.state_dict().items()}
        positions = read_positions(model, task.card.input.size, dtype)
        same = dataclasses.replace(task, model=model, carried=frozenset(), factors={})
        end = without_blocks(_shallow(model))
        starts = {k: tensor_hash(found.tensors[k]) for k in position_names(model, found.tensors) - found.hashes.keys()}
        kept = dataclasses.replace(found, tensors={})
        return cls(
            task.card, kept, frozenset(found.tensors), base_keys(task.card, task.path), starts,
            end, state, frozenset(created.initial), own, modules, positions,
        ), same  # fmt: skip

    @property
    def key(self) -> Hashable:
        """What tells it from the bank's other models of the base."""
        return model_key(self.card)

    def folded(self, reader: Reader, table: Tensor | None) -> "BaseModel":
        """Return the same for a folded bank."""
        return dataclasses.replace(self, reader=reader, table=table)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that it holds on the CPU."""
        small = [t for module in self.modules for t in module.small.values()]
        return [*self.end.parameters(), *self.end.buffers(), *small]

    def is_of(self, card: Card) -> bool:
        """Return whether a pack with this card has this model."""
        mine = self.card
        return (card.model.name, card.model.kwargs, card.transforms) == (
            mine.model.name, mine.model.kwargs, mine.transforms
        ) and (card.input.size, card.input.in_chans) == (mine.input.size, mine.input.in_chans)  # fmt: skip

    def supplies(self, pack: PackTensors) -> bool:
        """Return whether all that a pack needs of its base was there."""
        return base_needs(pack, self.keys)[0] <= self.has

    def moves_positions(self, pack: PackTensors) -> bool:
        """Return whether a pack has rotary frequencies or biases of relative positions of its own."""
        return any(
            name.partition(".")[0] in SEEN_BY_ATTENTION or RELATIVE in name or ".rel_pos." in name
            for name in (*pack.dense, *pack.factors)
        )

    def check(self, pack: PackTensors) -> None:
        """Refuse a pack that is damaged or of another base.

        Raises:
            DataError: its tensors are not those of its model, not finite, or absent.
            BaseError: a tensor of the base that it needs differs.
        """
        where = pack.path
        needed, starts = base_needs(pack, self.keys)
        wanted = {k: starts.get(k, pack.hashes.get(k)) for k in needed}
        known = {**self.base.hashes, **self.starts}
        for key in sorted(wanted):
            if known.get(key) != wanted[key]:
                raise BaseError(
                    f"{where} is of base {base_id(pack.hashes)[:12]}, this bank of {self.base.ref.id[:12]} (`{key}` "
                    "differs); serve it as a separate model"
                )
        state = dict(self.state)
        for key in head_names(self.end, state):
            state[key] = state[key].new_empty(len(pack.card.classes), *state[key].shape[1:])
        check_complete(where, pack.dense, state, self.required - pack.factors.keys())
        for name, change in pack.factors.items():
            check_matrix(name, change, state.get(name), where)

    def task_end(self, pack: PackTensors, dtype: torch.dtype) -> Any:
        """Return the model without blocks with a pack's values; tensors that it does not change are shared.

        Args:
            pack: that `check` has passed.
            dtype: of the bank; changes are added in fp32, in fp64 for it.
        """
        model = _shallow(self.end)
        classes = len(pack.card.classes)
        heads = [k for k in head_names(model) if len(model.state_dict()[k]) != classes]
        if heads:
            _resize_heads(model, {k.rpartition(".")[0] for k in heads}, classes)
        state = model.state_dict()
        wide = torch.promote_types(dtype, torch.float32)
        values = {k: full_precision(t) for k, t in pack.dense.items() if k in state}
        for name, change in pack.factors.items():
            if name in state and change.rank:
                values[name] = state[name].to(wide) + change.change(wide).reshape(state[name].shape)
        replace_tensors(model, values)
        return model.eval()


def model_key(card: Card) -> Hashable:
    """Return what tells the base's models of a bank apart: the image size, and the layout of the base's own table.

    Files of one base may say different things of the latter, and packs of factors start from what theirs said.
    """
    return card.input.size, read_layout(card, "the card")


def _resize_heads(model: Any, names: set[str], classes: int) -> None:
    for name in names:
        parent, _, leaf = name.rpartition(".")
        owner: Any = model.get_submodule(parent)
        old: Any = getattr(owner, leaf)
        with torch.device("meta"):
            setattr(owner, leaf, nn.Linear(old.in_features, classes, bias=old.bias is not None))
    model.num_classes = classes


def _shallow(model: Any) -> Any:
    """Return a copy of a model that has modules of its own and the same tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(t): t for t in tensors})
