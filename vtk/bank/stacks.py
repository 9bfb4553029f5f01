"""Attention weights of all tasks on a device, paged in from host memory if they do not all fit.

A grouped product needs the matrices of its groups in one tensor, so tasks have slots of stacks, or rows of arenas if
they have factors (`vtk.bank.device_pools`).
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from vtk.bank.device_form import ThinForm, WholeForm, is_thin, pinned, whole_form
from vtk.bank.device_pools import DevicePools
from vtk.bank.folded import Weights
from vtk.bank.grouped_weights import Slot
from vtk.bank.hot_tasks import HotTasks
from vtk.bank.slot_stacks import release
from vtk.bank.stores import Store
from vtk.models.packed.forward import Layer

_Form = ThinForm | WholeForm


class StackStore(Store):
    """Weights of tasks on a device; with a limit, also pinned copies of all of them on the host.

    One call at a time has its turn: an entering task may take the place of a leaving one; kernels of an earlier call,
    on any stream, must be done with it by then. What room factors leave holds merged copies of the most used tasks.
    """

    def __init__(self, device: torch.device, option: str = "max_gpu_bytes") -> None:
        super().__init__(option)
        self.device = device
        self.pools = DevicePools(device)
        self._host: dict[int, _Form] = {}
        self._sizes: dict[int, int] = {}
        self._thin: set[int] = set()
        self._copies: dict[int, int] = {}
        self._hot = HotTasks()
        self._last: tuple[Weights, _Form] | None = None
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

    @property
    def generation(self) -> tuple[int, int, int]:
        """Changes whenever weights get other addresses."""
        return self.pools.generation

    def put(self, number: int, weights: Weights) -> None:
        """Write the weights to the device; with a limit, into host memory until a call needs them."""
        if not self._sizes:  # the next base may have other shapes
            release(*self.pools.tensors())
            self.pools, self._last = DevicePools(self.device), None
        form = self._form(weights)
        self._last = None
        self.unit = self._sizes[number] = form.nbytes
        if isinstance(form, ThinForm):
            self._thin.add(number)
        if self.room is not None:
            self._host[number] = form if self._side is None else pinned(form)
            self.set_room(self.room)  # vectors that it shares with others may be new
            return
        self.residency.admit((number,), None, self._sizes)
        self.pools.reserve((number,), (form,), exact=False)
        for i in range(len(weights)):
            self.pools.write(i, number, form)

    def drop(self, number: int) -> None:
        """Free a task's places; the next task takes them, or memory is given back when much is free."""
        self._host.pop(number, None)
        self._sizes.pop(number, None)
        self._copies.pop(number, None)
        self._thin.discard(number)
        self._hot.forget(number)
        self.residency.forget(number)
        self.pools.drop(number)

    def cost(self, weights: Weights) -> int:
        """Return the bytes that weights would take."""
        return self._form(weights).nbytes

    def bytes_of(self, number: int) -> int:
        """Return the bytes of a task's weights, without a merged copy."""
        return self._sizes.get(number, 0)

    def has_factors(self, number: int) -> bool:
        """Return whether a task's weights are changes of the base's."""
        return number in self._thin

    def merged_bytes(self, number: int) -> int:
        """Return the bytes of a task's merged copy; 0 for none."""
        return self._copies.get(number, 0)

    def device_bytes(self) -> int:
        """Return the bytes of everything on the device, free slots and rows included."""
        return self.pools.nbytes

    def common_bytes(self) -> int:
        """Return the bytes of the base's matrices, of vectors that tasks share, and of free slots and rows."""
        own = sum(size for number, size in self._sizes.items() if number in self.residency)
        return self.pools.nbytes - own - sum(self._copies.values())

    def host_bytes(self) -> int:
        """Return the bytes of the host's copies."""
        return sum(form.nbytes for form in self._host.values())

    def set_room(self, room: int | None) -> None:
        """Change how many bytes there may be."""
        self.room = room
        if room is None:
            return
        self._make_room(0)
        for number in self.residency.shrink(max(0, room - self.pools.fixed_bytes)):
            self.pools.drop(number, shrink=False)
        if self.pools.nbytes > room:
            self.pools.tighten()

    def layers(self, numbers: Sequence[int], grouped: bool = True) -> tuple[list[Slot], Iterator[Layer]]:
        """Return the places of these tasks and the weights, layer by layer. Inside `turn`.

        Weights that are not on the device are copied on a side stream, in the order of layers; each layer waits only
        for its own.

        Args:
            numbers: of tasks.
            grouped: whether the call runs the kernels of many tasks; otherwise, where tasks have factors, a layer has
                one matrix for each of ``numbers``, in their order.
        """
        events = self._enter(numbers)
        self._hot.use(n for n in numbers if n in self._thin)
        whole = all(n in self.pools.whole.slots for n in numbers)
        layers: Any
        if whole:
            slots, layers = [Slot.whole(self.pools.whole.slots[n]) for n in numbers], self.pools.of_whole()
        elif grouped:
            slots, layers = self.pools.of_call(numbers)
        else:
            found = [self.pools.matrices(n) for n in numbers]
            slots = [Slot.whole(i) for i in range(len(numbers))]
            layers = [{key: [task[i][key] for task in found] for key in part} for i, part in enumerate(found[0])]
        return slots, iter(layers) if not events else _arriving(layers, events)

    def merge_hot(self, numbers: Sequence[int]) -> None:
        """Make a merged copy of one of these tasks, if it is used often and there is room. Inside `turn`."""
        called = [n for n in numbers if n in self._thin and n in self.residency]
        if self.room is None or not called:
            return
        size = self.pools.merged_unit
        base = self.pools.base_bytes((), merged=True)  # its own slot beside the first
        most = (self.room - self.pools.used_bytes + sum(self._copies.values()) - base) // size
        number, colder = self._hot.choose(called, self._copies.keys(), max(0, most))
        if number is None:
            return
        if colder is not None:
            self._unmerge(colder)
        if self.pools.nbytes + base + size > self.room:
            self.pools.tighten()
        self.pools.merge(number)
        self._copies[number] = size

    def _form(self, weights: Weights) -> _Form:
        if self._last is None or self._last[0] is not weights:  # `cost` comes before `put`
            thin = is_thin(weights) and self.pools.set_base(weights)
            self._last = weights, self.pools.thin_form(weights) if thin else whole_form(weights)
        return self._last[1]

    def _enter(self, numbers: Sequence[int]) -> list[Any]:
        """Bring tasks onto the device; return one event for each layer, none where nothing is left to wait for."""
        base, room = self._room_for(numbers)
        change = self.residency.admit(numbers, room, self._sizes)
        for number in change.leave:
            self._copies.pop(number, None)
            self.pools.drop(number, shrink=False)
        if not change.enter:
            return []
        forms = [self._host[n] for n in change.enter]
        self._make_room(base + sum(form.nbytes for form in forms))
        self.pools.reserve(change.enter, forms, exact=True)
        if self._side is None:
            for i in range(self.pools.depth):
                for number, form in zip(change.enter, forms, strict=True):
                    self.pools.write(i, number, form)
            return []
        self._side.wait_stream(torch.cuda.current_stream())  # who had the places before is done with them
        events = []
        with torch.cuda.stream(self._side):
            for i in range(self.pools.depth):
                for number, form in zip(change.enter, forms, strict=True):
                    self.pools.write(i, number, form)
                events.append(self._side.record_event())
        return events

    def _room_for(self, numbers: Sequence[int]) -> tuple[int, int | None]:
        """Return the bytes of the base among whole matrices that a call adds, and the room for weights of tasks."""
        if self.room is None:
            return 0, None
        kinds, needed = {n in self._thin for n in numbers}, sum(self._sizes[n] for n in numbers)
        for others in (False, True):
            if others:  # a call of one kind of tasks, for which the base beside those of the other leaves too little
                for number in [n for n in self.residency if (n in self._thin) not in kinds]:
                    self.residency.forget(number)
                    self.pools.drop(number, shrink=False)
                for number in list(self._copies):
                    self._unmerge(number)
            base = self.pools.base_bytes([self._host[n] for n in numbers if n not in self.residency])
            room = self.room - self.pools.fixed_bytes - base
            if needed <= room or len(kinds) > 1:
                break
        return base, max(0, room)

    def _make_room(self, size: int) -> None:
        """Drop merged copies of the least used tasks, and give free memory back, until so many bytes more fit."""
        if self.room is None:
            return
        while self._copies and self.pools.used_bytes + size > self.room:
            self._unmerge(min(self._copies, key=self._hot.score))
        if self.pools.nbytes + size > self.room:
            self.pools.tighten()

    def _unmerge(self, number: int) -> None:
        del self._copies[number]
        self.pools.drop_whole(number, shrink=False)


def _arriving(layers: Iterable[Layer], events: Sequence[Any]) -> Iterator[Layer]:
    for layer, event in zip(layers, events, strict=True):
        torch.cuda.current_stream().wait_event(event)
        yield layer


def numbered(slots: Sequence[Slot], numbers: Sequence[int]) -> Mapping[int, Slot]:
    """Return the slot of each number."""
    return dict(zip(numbers, slots, strict=True))
