"""Stacks of attention weights on a device, paged in from host memory if they do not all fit.

A grouped product needs the matrices of its groups in one tensor, so every weight is a stack of slots, one for a task.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vtk.bank.folded import Weights, merge, n_bytes, weights_bytes
from vtk.bank.stores import Store, merged_size
from vtk.models.packed.forward import Layer
from vtk.models.packed.low_rank import LowRankMatrix

_SPARE = 16
"""A full stack grows by 1/16: a bank saves memory, and copies are cheap."""


class StackStore(Store):
    """Slots of stacked tensors on a device; with a limit, also pinned copies of all weights on the host.

    One call at a time has its turn: an entering task may take the slot of a leaving one; kernels of an earlier call,
    on any stream, must be done with it by then.

    Attributes:
        generation: changes whenever stacks get other addresses.
        limit: most tasks on the device; None for all.
    """

    def __init__(self, device: torch.device, option: str = "max_gpu_bytes") -> None:
        super().__init__(option)
        self.device = device
        self.generation = 0
        self.limit: int | None = None
        self._stacks: list[dict[str, Tensor]] = []
        self._slots: dict[int, int] = {}
        self._host: dict[int, Sequence[Mapping[str, Tensor]]] = {}
        self._lock = threading.RLock()
        cuda = device.type == "cuda"
        self._side: Any = torch.cuda.Stream(device) if cuda else None
        self._done: Any = None  # event: the end of the last turn's work

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for other threads, and let this stream wait for their work on this store."""
        with self._lock:
            if self._side is None:
                yield
                return
            with torch.cuda.device(self.device):
                stream = torch.cuda.current_stream()
                if self._done is not None:
                    stream.wait_event(self._done)
                try:
                    yield
                finally:
                    stream.wait_stream(self._side)
                    self._done = self._done or torch.cuda.Event()
                    self._done.record(stream)

    def put(self, number: int, weights: Weights) -> None:
        """Write the weights into a slot; with a limit, into host memory until a call needs them.

        A task's changes of the base's matrices are merged here.
        """
        dense = merge(weights)
        self.unit = weights_bytes(dense)
        if not self._slots and not self._host:  # the next base may have other shapes
            self.generation += 1
            self._stacks = [
                {k: torch.empty(0, *t.shape, dtype=t.dtype, device=self.device) for k, t in part.items()}
                for part in dense
            ]
        if self.limit is None:
            self.residency.admit((number,), None)
            self._reserve((number,))
            for i in range(len(dense)):
                self._write(i, number, dense)
        else:
            pin = self._side is not None
            self._host[number] = tuple({k: t.pin_memory() if pin else t for k, t in p.items()} for p in dense)

    def drop(self, number: int) -> None:
        """Free the slot; the next task takes it, or the stacks shrink when many are free."""
        self._host.pop(number, None)
        self._slots.pop(number, None)
        self.residency.forget(number)
        if self.capacity - len(self._slots) > len(self._slots) // _SPARE:
            self._resize(len(self._slots))

    def cost(self, weights: Weights) -> int:
        """Return the bytes of a slot."""
        dense = (t for part in weights for t in part.values() if not isinstance(t, LowRankMatrix))
        return n_bytes(list(dense)) + merged_size(weights)

    def bytes_of(self, number: int) -> int:
        """Return the bytes of a slot."""
        return self.unit

    def set_room(self, room: int | None) -> None:
        """Change how many slots there may be."""
        self.room = room
        limit = self.limit = None if room is None else room // max(self.unit, 1)
        if limit is not None and limit < self.capacity:
            for number in self.residency.shrink(limit):
                del self._slots[number]
            self._resize(limit)

    def layers(self, numbers: Sequence[int]) -> tuple[list[int], Iterator[Layer]]:
        """Return the slots of these tasks and the stacks, layer by layer. Inside `turn`.

        Weights that are not on the device are copied on a side stream, in the order of layers; each layer waits only
        for its own.
        """
        change = self.residency.admit(numbers, self.limit)
        for number in change.leave:
            del self._slots[number]
        if not change.enter:
            return [self._slots[n] for n in numbers], iter(self._stacks)
        self._reserve(change.enter)
        return [self._slots[n] for n in numbers], self._arriving(self._fetch(change.enter))

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return len(next(iter(self._stacks[0].values()))) if self._stacks else 0

    def device_bytes(self) -> int:
        """Return the bytes of all slots, including free ones."""
        return self.capacity * self.unit

    def host_bytes(self) -> int:
        """Return the bytes of the host's copies."""
        return len(self._host) * self.unit

    def _fetch(self, numbers: Iterable[int]) -> list[Any]:
        """Start copying; return one event for each layer, None on a CPU, where copies are made at once."""
        if self._side is None:
            for i in range(len(self._stacks)):
                for number in numbers:
                    self._write(i, number, self._host[number])
            return [None] * len(self._stacks)
        self._side.wait_stream(torch.cuda.current_stream())  # who had the slots before is done with them
        events = []
        with torch.cuda.stream(self._side):
            for i in range(len(self._stacks)):
                for number in numbers:
                    self._write(i, number, self._host[number])
                events.append(self._side.record_event())
        return events

    def _arriving(self, events: Sequence[Any]) -> Iterator[Layer]:
        for stack, event in zip(self._stacks, events, strict=True):
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
            yield stack

    def _write(self, layer: int, number: int, weights: Sequence[Mapping[str, Tensor]]) -> None:
        for key, stack in self._stacks[layer].items():
            stack[self._slots[number]].copy_(weights[layer][key], non_blocking=True)

    def _reserve(self, numbers: Iterable[int]) -> None:
        """Give each number a free slot, from larger stacks if there are too few."""
        wanted = [n for n in numbers if n not in self._slots]
        needed = len(self._slots) + len(wanted)
        if needed > self.capacity:
            larger = needed + (self.capacity // _SPARE if needed > _SPARE * 2 else 0)
            self._resize(larger if self.limit is None else min(larger, self.limit))
        free = sorted(set(range(self.capacity)) - set(self._slots.values()))
        self._slots.update(zip(wanted, free, strict=False))

    def _resize(self, capacity: int) -> None:
        """Copy the slots in use to stacks of another size, one tensor after the other."""
        self.generation += 1
        order = sorted(self._slots, key=self._slots.__getitem__)
        used = torch.tensor([self._slots[n] for n in order], dtype=torch.int64, device=self.device)
        for part in self._stacks:
            for key, old in part.items():
                new = old.new_zeros(capacity, *old.shape[1:])
                new[: len(order)] = old[used]
                part[key] = new
                if self._side is not None:  # its memory is of another stream perhaps, which knows nothing of this one
                    old.record_stream(torch.cuda.current_stream())
        self._slots = {number: slot for slot, number in enumerate(order)}
