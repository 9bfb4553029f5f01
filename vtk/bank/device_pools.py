"""Everything of a device store that has an address: stacks of whole matrices, stacks of small tensors, arenas."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vtk.bank.arena_rows import ArenaRows
from vtk.bank.arenas import Arena
from vtk.bank.device_form import SPAN, ThinForm, WholeForm, small_parts
from vtk.bank.folded import Weights
from vtk.bank.grouped_weights import Factored, GroupedMatrix, Slot, SmallStack
from vtk.bank.slot_stacks import SlotStacks, release
from vtk.models.packed.low_rank import Change, LowRankMatrix, Matrix

BASE = -1
"""Number of the base's matrices among the whole ones, which tasks with factors read in a call of both."""


class DevicePools:
    """Weights of tasks on a device; one thread at a time uses them.

    Attributes:
        whole: stacks of tasks with whole matrices, of merged copies, and of the base where there are both kinds.
        small: stacks of biases and norms of tasks with factors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.whole, self.small = SlotStacks(device), SlotStacks(device, loose=True)
        self._arenas: list[dict[str, list[Arena]]] = []
        self._base: list[dict[str, Tensor]] = []  # on the device, while it has no slot among the whole ones
        self._given: list[dict[str, Tensor]] = []  # the base's matrices as the bank has them
        self._owned = 0

    @property
    def generation(self) -> tuple[int, int, int]:
        """Changes whenever something gets another address."""
        arenas = max((arena.generation for arena in self._all_arenas()), default=0)
        return self.whole.generation, self.small.generation, arenas

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.whole.stacks or self.small.stacks)

    @property
    def fixed_bytes(self) -> int:
        """Bytes that no task alone needs: vectors that tasks share, and the base's matrices beside the bank's own."""
        vectors = sum(arena.vector_bytes for arena in self._all_arenas())
        return vectors + self._owned + (self.whole.unit if BASE in self.whole.slots else 0)

    @property
    def merged_unit(self) -> int:
        """Bytes of a merged copy."""
        return self.whole.unit or self.small.unit + sum(t.nbytes for part in self._given for t in part.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of what tasks use, and of what they share."""
        arenas = self._all_arenas()
        tasks = self.whole.unit * (len(self.whole.slots) - (BASE in self.whole.slots))
        slots = (self.small.unit + SPAN * sum(map(len, self._arenas))) * len(self.small.slots)
        return self.fixed_bytes + tasks + slots + sum(arena.used_bytes for arena in arenas)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, free slots and rows included."""
        arenas = sum(arena.nbytes for arena in self._all_arenas())
        return self.whole.nbytes + self.small.nbytes + arenas + self._owned

    def tensors(self) -> list[Tensor]:
        """Return all tensors on the device."""
        stacks = [t for pool in (self.whole, self.small) for part in pool.stacks for t in part.values()]
        arenas = [t for arena in self._all_arenas() for t in arena.tensors()]
        return [*stacks, *arenas, *(t for part in self._base for t in part.values())]

    def base_bytes(self, forms: Sequence[ThinForm | WholeForm], *, merged: bool = False) -> int:
        """Return the bytes that the base takes among whole matrices once these tasks, or a merged copy, are there."""
        thin = bool(self.small.slots) or any(isinstance(f, ThinForm) for f in forms)
        whole = merged or any(isinstance(f, WholeForm) for f in forms)
        whole = whole or len(self.whole.slots) > (BASE in self.whole.slots)
        return self.merged_unit - self._owned if thin and whole and BASE not in self.whole.slots else 0

    def set_base(self, weights: Weights) -> bool:
        """Take the base's matrices from a task with factors; return whether it is the same base as before."""
        given = [{k: t.base for k, t in part.items() if isinstance(t, LowRankMatrix)} for part in weights]
        if not self._given:
            self._given = given
            self._upload_base()
            self._arenas = [{k: [] for k in part} for part in given]
        return all(
            mine.keys() == new.keys() and all(t is new[k] or torch.equal(t, new[k]) for k, t in mine.items())
            for mine, new in zip(self._given, given, strict=True)
        )

    def thin_form(self, weights: Weights) -> ThinForm:
        """Return a task's factors as rows of the arenas: int8 codes where their shared vectors agree, else numbers."""
        rows: list[dict[str, ArenaRows]] = []
        for i, part in enumerate(weights):
            rows.append({})
            for key, matrix in part.items():
                if isinstance(matrix, LowRankMatrix) and matrix.rank:
                    found = ArenaRows.codes(matrix)
                    if found is None or self._arena(i, key, found) is None:
                        found = ArenaRows.of(matrix, matrix.base.dtype)
                        self._arena(i, key, found)
                    rows[i][key] = found
        return ThinForm(small_parts(weights), rows, sum(map(len, self._given)))

    def reserve(self, numbers: Sequence[int], forms: Sequence[ThinForm | WholeForm], *, exact: bool) -> None:
        """Find places for tasks, in larger memory if there is too little; ``exact``: no larger than it must be."""
        whole = {n: f for n, f in zip(numbers, forms, strict=True) if isinstance(f, WholeForm)}
        thin = {n: f for n, f in zip(numbers, forms, strict=True) if isinstance(f, ThinForm)}
        if whole:
            self.whole.shape(next(iter(whole.values())).parts)
            self.whole.reserve(whole, self.whole.needs(whole) if exact else None)
        if thin:
            self.small.shape(next(iter(thin.values())).parts)
            order = self.small.reserve(thin, self.small.needs(thin) if exact else None)
            if order is not None:
                for arena in self._all_arenas():
                    arena.reserve_slots(self.small.capacity, torch.tensor(order, dtype=torch.int64))
            for base, found in zip(self._given, self._arenas, strict=True):
                for key, matrix in base.items():
                    found[key] = found[key] or [Arena(matrix, self.small.capacity, codes=False, device=self.device)]
        for number, form in thin.items():
            for i, part in enumerate(form.rows):
                for key, rows in part.items():
                    found_arena = self._arena(i, key, rows)
                    assert found_arena is not None, "its vectors were taken over when it was read"
                    found_arena.reserve(self.small.slots[number], rows.rank, exact=exact)
        self._keep_base()

    def write(self, layer: int, number: int, form: ThinForm | WholeForm) -> None:
        """Copy a task's weights of one layer to their places."""
        if isinstance(form, WholeForm):
            self.whole.write(layer, number, form.parts[layer])
            return
        self.small.write(layer, number, form.parts[layer])
        for key, rows in form.rows[layer].items():
            arena = self._arena(layer, key, rows)
            assert arena is not None
            arena.write(self.small.slots[number], rows)

    def drop(self, number: int, *, shrink: bool = True) -> None:
        """Free a task's places, a merged copy too; ``shrink`` gives memory back where much would be free."""
        self.drop_whole(number, shrink=shrink)
        slot = self.small.slots.get(number)
        if slot is None:
            return
        for arena in self._all_arenas():
            arena.drop(slot, shrink=shrink)
        order = self.small.drop(number, shrink=shrink)
        if order is not None:
            for arena in self._all_arenas():
                arena.reserve_slots(self.small.capacity, torch.tensor(order, dtype=torch.int64))

    def drop_whole(self, number: int, *, shrink: bool = True) -> None:
        """Free a task's whole matrices."""
        if number in self.whole.slots:
            self.whole.drop(number, shrink=shrink)
        self._keep_base(shrink=shrink)

    def tighten(self) -> None:
        """Give all free slots and rows back."""
        if self.whole.capacity > len(self.whole.slots):
            self.whole.resize(len(self.whole.slots))
        if self.small.capacity > len(self.small.slots):
            order = torch.tensor(self.small.resize(len(self.small.slots)), dtype=torch.int64)
            for arena in self._all_arenas():
                arena.reserve_slots(self.small.capacity, order)
        for arena in self._all_arenas():
            arena.tighten()

    def merge(self, number: int) -> None:
        """Make a merged copy of a task with factors, on the device."""
        weights = self.matrices(number)
        merged = [{k: t.merged() if isinstance(t, LowRankMatrix) else t for k, t in part.items()} for part in weights]
        self.whole.shape(merged)
        self.whole.reserve((number,), self.whole.needs((number,)))
        for i, part in enumerate(merged):
            self.whole.write(i, number, part)
        self._keep_base()

    def of_whole(self) -> list[dict[str, Tensor]]:
        """Return the stacks of whole matrices, layer by layer."""
        return self.whole.stacks

    def of_call(self, numbers: Sequence[int]) -> tuple[list[Slot], list[dict[str, GroupedMatrix | SmallStack]]]:
        """Return the places of a call's tasks, some with factors, and the weights layer by layer."""
        mixed = any(n in self.whole.slots for n in numbers)
        first, base = self.whole.capacity if mixed else 0, self.whole.slots.get(BASE, 0) if mixed else 0
        slots = []
        for n in numbers:
            if n in self.whole.slots:
                slots.append(Slot.whole(self.whole.slots[n]))
            else:
                slot = self.small.slots[n]
                slots.append(Slot(base, first + slot, slot))
        layers: list[dict[str, GroupedMatrix | SmallStack]] = []
        for i, small in enumerate(self.small.stacks):
            whole = self.whole.stacks[i] if self.whole.stacks else {}
            layers.append({key: SmallStack(t, whole.get(key)) for key, t in small.items()})
            for key, base_matrix in self._base_of(i).items():
                bias = key.replace("weight", "bias")
                arenas = self._arenas[i][key]  # one of them, of rank 0 perhaps, adds the biases
                factors = tuple(Factored.of(a) for a in arenas if a.rank) or (Factored.of(arenas[0]),)
                layers[i][key] = GroupedMatrix(base_matrix, small[bias], factors, whole.get(key), whole.get(bias))
        return slots, layers

    def matrices(self, number: int) -> list[dict[str, Matrix]]:
        """Return the weights of one task, as of `Weights`; views of stacks and arenas where these hold numbers."""
        if (slot := self.whole.slots.get(number)) is not None:
            return [{key: stack[slot] for key, stack in part.items()} for part in self.whole.stacks]
        at, found = self.small.slots[number], list[dict[str, Matrix]]()
        for i, (small, arenas) in enumerate(zip(self._small_of(number), self._arenas, strict=True)):
            found.append(dict(small))
            for key, matrix in self._base_of(i).items():
                values = [arena.values(at) for arena in arenas[key]]
                found[-1][key] = LowRankMatrix(matrix, tuple(Change(a, b.T) for a, b in values if len(a)))
        return found

    def _small_of(self, number: int) -> list[dict[str, Tensor]]:
        slot = self.small.slots[number]
        return [{key: stack[slot] for key, stack in part.items()} for part in self.small.stacks]

    def _arena(self, layer: int, key: str, rows: ArenaRows) -> Arena | None:
        """Return the arena that takes these factors, a new one if there is none of their type; None if that refuses."""
        arenas, codes = self._arenas[layer][key], rows.a.dtype == torch.int8
        found = next((arena for arena in arenas if (arena.a.dtype == torch.int8) == codes), None)
        if found is None:
            found = Arena(self._given[layer][key], self.small.capacity, codes=codes, device=self.device)
            arenas.append(found)
        return found if found.accept(rows) else None

    def _all_arenas(self) -> list[Arena]:
        return [arena for part in self._arenas for arenas in part.values() for arena in arenas]

    def _base_of(self, layer: int) -> dict[str, Tensor]:
        slot = self.whole.slots.get(BASE)
        if slot is None:
            return self._base[layer]
        return {key: self.whole.stacks[layer][key][slot] for key in self._given[layer]}

    def _upload_base(self) -> None:
        self._base = [{k: t.to(self.device) for k, t in part.items()} for part in self._given]
        self._owned = sum(t.nbytes for part in self._base for t in part.values())

    def _keep_base(self, *, shrink: bool = True) -> None:
        """Hold the base among the whole matrices while there are both kinds, and by itself otherwise."""
        mixed = bool(self.small.slots) and len(self.whole.slots) > (BASE in self.whole.slots)
        if mixed and BASE not in self.whole.slots:
            self.whole.reserve((BASE,), self.whole.needs((BASE,)))
            for i, base in enumerate(self._base):
                blank = {k: t.new_zeros(t.shape[1:]) for k, t in self.whole.stacks[i].items() if k not in base}
                self.whole.write(i, BASE, {**blank, **base})
            release(*(t for part in self._base for t in part.values()))
            self._base, self._owned = [], 0
        elif BASE in self.whole.slots and not mixed:
            self.whole.drop(BASE, shrink=shrink)
            self._upload_base()
