"""Reads packs for a bank, and makes tasks of them: whole packs by a model of their own, packs of factors by the base's.

The first pack of factors of an image size builds the base's model of that size. For all others of it only their own
tensors are read, checked and folded.
"""

import dataclasses
import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from vtk.bank.base_attention import BaseAttention
from vtk.bank.base_model import BaseModel, model_key
from vtk.bank.folded import Folding, Piece, Weights, fold
from vtk.bank.positions import TaskPositions, read_positions
from vtk.bank.shared_weights import Shared, build, check_structure
from vtk.bank.snapshot import State
from vtk.bank.task_entry import Entry, make_entry, make_factor_entry
from vtk.errors import UsageError
from vtk.fused.families import reader_of
from vtk.packs.cards import find_pack, is_pack, read_card, read_hashes
from vtk.packs.factors import PackTensors, read_pack
from vtk.packs.load import Task, build_from_card, load_task, start_base


class Unfit(Exception):
    """A pack has to be loaded again: the bank has changed; or, with ``merge``, its changes have to be merged."""

    def __init__(self, merge: bool = False) -> None:
        super().__init__()
        self.merge = merge


@dataclass(frozen=True, eq=False)
class Incoming:
    """A pack that was read.

    Attributes:
        task: loaded; of a pack of factors the base as a task, None if the bank has its model.
        folding: of ``task``, of a bank that folds.
        pack: tensors of a pack of factors; None of a whole one.
        model: the base's, of its size.
        positions: of its own, where it trained what attention sees of them.
    """

    task: Task | None
    folding: Folding | None
    pack: PackTensors | None = None
    model: BaseModel | None = None
    positions: TaskPositions | None = None


@dataclass(frozen=True, eq=False)
class SharedBase:
    """What tasks of a bank have in common; attributes as of `State`."""

    shared: Shared
    models: Mapping[Hashable, BaseModel]
    attention: BaseAttention | None


@dataclass(frozen=True, eq=False)
class Made:
    """A task that is not yet in the bank; ``piece`` is None unless the bank is folded."""

    entry: Entry
    weights: Weights
    piece: Piece | None
    positions: TaskPositions


class Loader:
    """Reads packs and makes tasks of them.

    Args:
        base: file of the base; None to look up each pack's own.
        device: of the bank.
        dtype: of the bank.
        folds: whether models are folded.
        must_fold: whether one that cannot be is refused.
        resident: whether calls read weights where the loader puts them; else a store copies them from the CPU.
    """

    def __init__(
        self, base: Path | None, device: torch.device, dtype: torch.dtype, folds: bool,
        must_fold: Callable[[], bool], resident: bool,
    ) -> None:  # fmt: skip
        self.base, self.device, self.dtype = base, device, dtype
        self.folds, self.must_fold, self.resident = folds, must_fold, resident

    def load(self, given: str | Path | Task, state: State, *, merge: bool = False) -> Incoming:
        """Read a pack.

        Args:
            given: its folder, or a loaded task.
            state: of the bank, whose models of the base are used.
            merge: merge factors into whole matrices.
        """
        pack = None if merge else _factors(given)
        if pack is not None and state.attention is not None:
            model = state.models.get(model_key(pack.card))
            if model is not None and model.is_of(pack.card) and model.supplies(pack):
                model.check(pack)
                return Incoming(None, None, pack, model, self._positions(given, pack, model))
        task = given if isinstance(given, Task) else load_task(given, base=self.base)
        if merge and self.dtype == torch.float64:
            add_exactly(task)
        check_structure(task)
        size = task.card.input.size
        if pack is None:
            return Incoming(task, self._fold(task, whole=not state.entries))
        model, same = BaseModel.of(task, self.dtype)
        folding = self._fold(same, whole=not state.entries)
        if folding is not None:
            table = folding.piece.table
            place = self.device if self.resident else torch.device("cpu")
            held = table.to(place) if isinstance(table, torch.Tensor) else None
            model = model.folded(reader_of(same.model), held)
        pos_embed = model.end._parameters.get("pos_embed")
        if self.resident and pos_embed is not None and (folding is None or folding.piece.table is None):
            held = pos_embed.detach()[0].to(self.device, self.dtype, copy=True)
            model = dataclasses.replace(model, pos_embed=held)
        model.check(pack)
        own = read_positions(task.model, size, self.dtype) if model.moves_positions(pack) else None
        return Incoming(same, folding, pack, model, own)

    def shared_of(self, incoming: Incoming, state: State, *, empty: bool) -> SharedBase:
        """Return what the bank's tasks have in common, once this one is among them.

        Args:
            incoming: the pack.
            state: of the bank.
            empty: whether it has no other tasks, so that another model may take their place.

        Raises:
            UsageError, BaseError: the pack does not fit the bank's other tasks.
            Unfit: load it again.
        """
        task, folding, pack, model = incoming.task, incoming.folding, incoming.pack, incoming.model
        shared, models, attention = state.shared, state.models, state.attention
        if task is None:
            if shared is None or model is None or state.models.get(model.key) is not model:
                raise Unfit
        elif shared is not None and not empty:
            shared.check(task)
        elif shared is None or not shared.fits(task):
            if folding is not None and folding.shared is None:  # the other tasks have gone meanwhile
                folding = fold(task.model, task.card.input.size, self.dtype)
            shared = build(task, self.device, self.dtype, None if folding is None else folding.shared)
            models, attention = {}, None
        if pack is None or model is None:
            return SharedBase(shared, models, attention)
        shared.check_factors(pack, model.own)
        if task is not None:
            weights = folding.weights if folding is not None and shared.folded is not None else None
            place = self.device if self.resident else None
            attention = attention or BaseAttention.of(model, task, weights, self.dtype, place)
            models = {**models, model.key: model}
        if attention is None:
            raise Unfit
        if not attention.supplies(model, pack):
            raise Unfit(merge=True)
        return SharedBase(shared, models, attention)

    def make(self, name: str, incoming: Incoming, base: SharedBase) -> Made:
        """Return a task.

        Raises:
            UsageError: its embedding or head is of another kind than those of the bank's other tasks.
            Unfit: load it again, merged.
        """
        shared, attention, folding = base.shared, base.attention, incoming.folding
        folding = folding if shared.folded is not None else None
        piece: Piece | None
        if incoming.pack is None:
            assert incoming.task is not None
            piece = None if folding is None else folding.piece
            _check(piece, shared, incoming.task.path)
            positions = read_positions(incoming.task.model, incoming.task.card.input.size, self.dtype)
            entry, weights = make_entry(name, incoming.task, shared, self.device, self.dtype, folding)
            if entry.number == shared.number and attention is not None and attention.whole:
                weights = attention.task()
            return Made(entry, weights, piece, positions)
        assert incoming.model is not None and attention is not None
        found = attention.weights_of(incoming.model, incoming.pack, self.dtype)
        if found is None:
            raise Unfit(merge=True)
        entry, piece = make_factor_entry(name, incoming.pack, incoming.model, shared, self.device, self.dtype)
        _check(piece, shared, incoming.pack.path)
        return Made(entry, found, piece, incoming.positions or incoming.model.positions)

    def _fold(self, task: Task, *, whole: bool) -> Folding | None:
        if not self.folds:
            return None
        try:
            return fold(task.model, task.card.input.size, self.dtype, whole=whole)
        except UsageError:
            if self.must_fold():
                raise
            return None

    def _positions(self, given: str | Path | Task, pack: PackTensors, model: BaseModel) -> TaskPositions | None:
        """Return the positions that a pack's own tensors make; None if they are the base's."""
        if not model.moves_positions(pack):
            return None
        task = given if isinstance(given, Task) else load_task(given, base=self.base)
        return read_positions(task.model, task.card.input.size, self.dtype)


def add_exactly(task: Task) -> None:
    """Add a task's changes to its base's matrices in fp64, in place; it was loaded in fp32."""
    if not task.factors or task.base is None:
        return
    base = build_from_card(task.card, base=start_base(task.base, task.card, task.path)).model
    start, state = base.state_dict(), task.model.double().state_dict()
    with torch.no_grad():
        for name, change in task.factors.items():
            if change.rank:
                wide = start[name].double()
                state[name].copy_(wide + change.change(torch.float64).reshape(wide.shape))


def _check(piece: Piece | None, shared: Shared, path: Path) -> None:
    if piece is not None and shared.folded is not None:
        Folding(None, (), piece).check(shared.folded, path)


def _factors(given: str | Path | Task) -> PackTensors | None:
    """Return the tensors of a pack of factors; None of a whole one, or of what is no pack."""
    if isinstance(given, Task):
        if not given.factors:
            return None
        state = given.model.state_dict()
        dense = {name: state[name] for name in given.carried - given.factors.keys()}
        return PackTensors(given.path, given.card, read_hashes(given.path), dense, given.factors)
    if not isinstance(given, str | os.PathLike):  # `load_task` says so
        return None
    if not (is_pack(Path(given)) or is_pack(Path(given) / "task")):
        return None
    folder = find_pack(Path(given))
    card = read_card(folder)
    return read_pack(folder, card) if card.pack.get("factors") else None
