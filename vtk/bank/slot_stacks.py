"""Stacked tensors on a device, with a slot for each task: what a grouped product reads."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

GENERATIONS = itertools.count(1)
"""Numbers of all states of memory that has an address; none comes twice."""

_SPARE = 16
"""A full stack grows by 1/16: a bank saves memory, and copies are cheap."""


def release(*tensors: Tensor | None) -> None:
    """Let tensors go that kernels of this stream may still read: their memory is perhaps of another stream's."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())


class SlotStacks:
    """Stacks of equal tensors of many tasks, layer by layer.

    Args:
        device: of the stacks.
        loose: whether up to half of the slots stay when they are free, so that addresses last; otherwise a sixteenth.

    Attributes:
        stacks: (slots, …) tensors by name, of each layer.
        slots: of each number.
        generation: changes whenever stacks get other addresses.
        unit: bytes of a slot; 0 of layers without such tensors, whose tasks have slots all the same.
        capacity: number of slots.
    """

    def __init__(self, device: torch.device, *, loose: bool = False) -> None:
        self.device, self.loose = device, loose
        self.stacks: list[dict[str, Tensor]] = []
        self.slots: dict[int, int] = {}
        self.generation, self.unit, self.capacity = next(GENERATIONS), 0, 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, of free ones too."""
        return self.capacity * self.unit

    def shape(self, values: Sequence[Mapping[str, Tensor]]) -> None:
        """Make empty stacks for tensors like these, if there are none."""
        if not self.stacks:
            self.generation = next(GENERATIONS)
            self.unit = sum(t.numel() * t.element_size() for part in values for t in part.values())
            self.stacks = [
                {k: torch.empty(0, *t.shape, dtype=t.dtype, device=self.device) for k, t in part.items()}
                for part in values
            ]

    def write(self, layer: int, number: int, values: Mapping[str, Tensor]) -> None:
        """Copy a task's tensors of one layer into its slot."""
        for key, stack in self.stacks[layer].items():
            stack[self.slots[number]].copy_(values[key], non_blocking=True)

    def needs(self, numbers: Iterable[int]) -> int:
        """Return the slots that there would have to be to hold these, too."""
        return len(self.slots.keys() | set(numbers))

    def reserve(self, numbers: Iterable[int], limit: int | None = None) -> list[int] | None:
        """Give each number a slot, in larger stacks if there are too few.

        Args:
            numbers: of tasks.
            limit: most slots; None for any number.

        Returns:
            The old slots of all tasks if they have moved; None if they have not.
        """
        wanted = [n for n in numbers if n not in self.slots]
        needed, moved = len(self.slots) + len(wanted), None
        if needed > self.capacity:
            larger = needed + (self.capacity // _SPARE if needed > _SPARE * 2 else 0)
            moved = self.resize(larger if limit is None else max(needed, min(larger, limit)))
        taken = set(self.slots.values())
        free = (slot for slot in range(self.capacity) if slot not in taken)
        self.slots.update(zip(wanted, free, strict=False))
        return moved

    def drop(self, number: int, *, shrink: bool = True) -> list[int] | None:
        """Free a slot for the next task; the stacks shrink when many are free. Returns what `reserve` does."""
        self.slots.pop(number, None)
        used = len(self.slots)
        if shrink and self.capacity - used > (used if self.loose else used // _SPARE):
            return self.resize(len(self.slots))
        return None

    def resize(self, capacity: int) -> list[int]:
        """Copy the slots in use to stacks of another size, one tensor after the other; return their old slots."""
        self.generation = next(GENERATIONS)
        order = sorted(self.slots, key=self.slots.__getitem__)
        old_slots = [self.slots[n] for n in order]
        used = torch.tensor(old_slots, dtype=torch.int64, device=self.device)
        for part in self.stacks:
            for key, old in part.items():
                new = old.new_zeros(capacity, *old.shape[1:])
                new[: len(order)] = old[used]
                part[key] = new
                release(old)
        self.slots, self.capacity = {number: slot for slot, number in enumerate(order)}, capacity
        return old_slots
