"""Loads the packs of one export: checks that they fit together, and computes each task's reference logits."""

import copy
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vtk.bank.bank import TaskBank
from vtk.bank.shared_weights import check_structure, replace_tensors
from vtk.card import FIRST_SCHEMA, Card
from vtk.errors import BaseError, DataError, UsageError
from vtk.files import existing_dir
from vtk.packs.load import Task, load_task
from vtk.runtime.data_option import data_images
from vtk.runtime.data_parts import Split
from vtk.runtime.opening import open_source
from vtk_export.gate.images import card_images

_FREE = "add_context_broadcast"
"""The transform in which tasks of separate files may differ: it moves no weight of the base."""


@dataclass
class Member:
    """One task of the export.

    Attributes:
        name: of its files.
        path: of its pack.
        card: as it goes into the files.
        transforms: of the model, as text to compare.
        images: (n, chans, height, width) fp32, normalised, to verify with.
        torch: (n, classes), the single-task model's logits.
        bank: (n, classes), those of a `TaskBank` that holds all tasks it can.
    """

    name: str
    path: Path
    card: Card
    transforms: str
    images: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    torch: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    bank: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))


def open_members(packs: Mapping[str, Path], *, one_size: bool) -> list[Member]:
    """Read the cards of packs, and refuse packs that cannot be exported together, before any weights are read.

    Args:
        packs: name to pack or run folder.
        one_size: all must take images of one size and have the same transforms.

    Raises:
        UsageError: no packs, other architectures, or other sizes where one is needed; both packs are named.
        BaseError: packs of different bases.
        DataError: no pack there, or a damaged one.
    """
    members: list[Member] = []
    for name, path in packs.items():
        if not existing_dir(path).exists():
            raise DataError(f"{path} does not exist; give packs or run folders, each as PACK or NAME=PACK")
        source = open_source(path)
        if source.kind != "pack" or source.path is None:
            raise UsageError(f"{path} is not a task pack but a {source.kind}, which shares no base; give packs")
        if source.card.base is None:
            raise DataError(f"the card of {source.path} names no base; the pack was edited")
        transforms = json.dumps([dataclasses.asdict(t) for t in source.card.transforms], sort_keys=True)
        members.append(Member(name, source.path, source.card, transforms))
    for member in members[1:]:
        _check_pair(members[0], member, one_size)
    return members


def _check_pair(first: Member, other: Member, one_size: bool) -> None:
    a, b = first.card, other.card
    both = f"`{first.name}` ({first.path}) and `{other.name}` ({other.path})"
    alone = "export them apart (`vtk export onnx`)"
    if (a.model.name, a.model.kwargs) != (b.model.name, b.model.kwargs):
        raise UsageError(f"{both} are a {_call(a)} and a {_call(b)}; tasks of one export are one model: {alone}")
    assert a.base is not None and b.base is not None
    if a.base.id != b.base.id:
        raise BaseError(
            f"{both} are of the bases {a.base.id[:12]} and {b.base.id[:12]}, so they share no weights; {alone}"
        )
    free = frozenset() if one_size else frozenset({_FREE})
    if _ops(a, free) != _ops(b, free):
        hint = "use --form files, or " if _ops(a, frozenset({_FREE})) == _ops(b, frozenset({_FREE})) else ""
        raise UsageError(f"{both} have different transforms ({_ops(a)} and {_ops(b)}); {hint}{alone}")
    sizes = [(c.input.in_chans, *c.input.size) for c in (a, b)]
    if one_size and sizes[0] != sizes[1]:
        sides = " and ".join("×".join(map(str, size)) for size in sizes)
        raise UsageError(f"{both} take images of {sides} (channels, height, width); a file of many tasks has "
                         "one input, so use --form files, where each task has its own")  # fmt: skip


class Loader:
    """Loads members one after the other; tensors that a task has in common with the first one are held once."""

    def __init__(
        self, base: Path | None, data: Mapping[str, Path | None], split: Split | None, seed: int, count: int
    ) -> None:
        self._base, self._data, self._split, self._seed, self._count = base, data, split, seed, count
        self._banks: dict[str, TaskBank] = {}
        self._first: dict[str, Tensor] = {}
        self._loaded = 0
        self._whats: list[str] = []

    @property
    def what(self) -> str:
        """Description of the images of the tasks."""
        kinds = list(dict.fromkeys(self._whats))
        return f"{kinds[0]}, for each task" if len(kinds) == 1 else "; ".join(kinds)

    def load(self, member: Member, count: int | None = None) -> Task:
        """Return the member's task, its model in eval mode, and fill in its images and logits.

        Args:
            member: to load.
            count: of images; by default that of all members.

        Raises:
            UsageError: an architecture that a bank does not take, or a pack that changed what tasks share.
            DataError: the pack is damaged, or its base is not found.
        """
        task = load_task(member.path, base=self._base)
        check_structure(task)
        model: Any = task.model
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        same = {
            k: self._first[k] for k, v in state.items() if k in self._first and torch.equal(self._first[k], v.detach())
        }
        replace_tensors(model, same)
        self._first = self._first or {k: v.detach() for k, v in state.items()}
        bank = self._banks.setdefault(member.transforms, TaskBank(self._base, dtype=torch.float32))
        bank.add(member.name, dataclasses.replace(task, model=twin(model)))
        # another seed for each task: were all tasks' images alike, an image that met another's weights might not show
        seed = self._seed + self._loaded
        given = data_images(member.card, self._data[member.name], self._split)
        member.images, what = card_images(member.card, count or self._count, given, seed=seed)
        self._whats.append(what)
        with torch.no_grad():
            member.torch = model(member.images)
        member.card = dataclasses.replace(member.card, base=None, pack={}, schema=FIRST_SCHEMA)
        self._loaded += 1
        return task

    def run_banks(self, members: Sequence[Member]) -> None:
        """Fill in the banks' logits, all images of all tasks of a bank in one call, and release the banks."""
        for transforms, bank in self._banks.items():
            mine = {member.name: member for member in members if member.transforms == transforms}
            for name, logits in bank({name: member.images for name, member in mine.items()}).items():
                mine[name].bank = logits
        self._banks.clear()
        self._first.clear()


def twin(model: Any) -> Any:
    """Return a copy of a module that shares its tensors: a bank modifies modules, not tensors."""
    held = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in held})


def _call(card: Card) -> str:
    return " ".join([card.model.name, *(f"{k}={v}" for k, v in card.model.kwargs.items())])


def _ops(card: Card, without: frozenset[str] = frozenset()) -> str:
    named = [f"{t.op}({', '.join(f'{k}={v}' for k, v in sorted(t.args.items()))})" for t in card.transforms
             if t.op not in without]  # fmt: skip
    return " and ".join(named) or "none"
