"""Stores of the tasks' attention weights: the interface, and the store for a CPU, which keeps tasks apart.

On a CPU a loop is as fast as a grouped product, tasks keep their own tensors, and calls run concurrently.
"""

import abc
import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from vtk.bank.folded import Weights, merge, weights_bytes
from vtk.bank.hot_tasks import HotTasks
from vtk.bank.residency import Residency
from vtk.models.packed.low_rank import LowRankMatrix


class Store(abc.ABC):
    """Attention weights by number.

    A task with factors has `LowRankMatrix` among its weights, on matrices of the base that the bank holds.

    Attributes:
        unit: bytes of the weights that came last.
        room: bytes for all of them on the device; None for any number.
        residency: which are there.
    """

    def __init__(self, option: str = "max_gpu_bytes") -> None:
        self.unit = 0
        self.room: int | None = None
        self.residency = Residency(option)

    @abc.abstractmethod
    def put(self, number: int, weights: Weights) -> None:
        """Add a task's weights, on the CPU in the bank's dtype. Inside `turn`."""

    @abc.abstractmethod
    def drop(self, number: int) -> None:
        """Remove a task's weights. Inside `turn`."""

    @abc.abstractmethod
    def turn(self) -> contextlib.AbstractContextManager[Any]:
        """Wait until weights may be changed or, where calls cannot overlap, used."""

    @abc.abstractmethod
    def bytes_of(self, number: int) -> int:
        """Return the bytes of a task's weights, without a merged copy."""

    @abc.abstractmethod
    def cost(self, weights: Weights) -> int:
        """Return the bytes that weights would take."""

    @abc.abstractmethod
    def device_bytes(self) -> int:
        """Return the bytes on the device, merged copies included."""

    def common_bytes(self) -> int:
        """Return the bytes on the device that are of no single task, such as the base's matrices and free places."""
        return 0

    @abc.abstractmethod
    def host_bytes(self) -> int:
        """Return the bytes of copies on the host for paging."""

    @abc.abstractmethod
    def set_room(self, room: int | None) -> None:
        """Change how many bytes may be on the device. Inside `turn`."""

    def has_factors(self, number: int) -> bool:
        """Return whether a task's weights are changes of the base's."""
        return False

    def merged_bytes(self, number: int) -> int:
        """Return the bytes of a task's merged copy; 0 for none."""
        return 0


class HeldStore(Store):
    """Each task's own tensors in host memory; the room for them is tracked, not enforced, but for merged copies.

    Room that factors and called tasks leave holds merged copies of the most used tasks with factors.

    Attributes:
        held: weights by number; replaced, never changed, so that a call may keep the mapping it began with.
        merged: merged copies, likewise.
    """

    def __init__(self, option: str = "max_gpu_bytes") -> None:
        super().__init__(option)
        self.held: Mapping[int, Weights] = {}
        self.merged: Mapping[int, Weights] = {}
        self._sizes: dict[int, int] = {}
        self._thin: dict[int, int] = {}
        self._absent = 0  # bytes of factors that do not count as present
        self._copies: dict[int, int] = {}
        self._hot = HotTasks()
        self._lock = threading.RLock()

    def put(self, number: int, weights: Weights) -> None:
        """Keep the weights."""
        self.held = {**self.held, number: weights}
        self.unit = self._sizes[number] = weights_bytes(weights)
        if is_thin(weights):
            self._thin[number] = self._sizes[number]
            self._absent += self._sizes[number]
        if self.room is None or number in self._thin:
            self._admit((number,))

    def drop(self, number: int) -> None:
        """Forget the weights; a call that uses them keeps them until it is done."""
        self.held = {n: w for n, w in self.held.items() if n != number}
        self._unmerge((number,))
        if number in self.residency:
            self._left((number,))
        self.residency.forget(number)
        self._absent -= self._thin.pop(number, 0)
        self._sizes.pop(number, None)
        self._hot.forget(number)

    def turn(self) -> contextlib.AbstractContextManager[Any]:
        """Guard the account."""
        return self._lock

    def cost(self, weights: Weights) -> int:
        """Return the bytes of the tensors."""
        return weights_bytes(weights)

    def bytes_of(self, number: int) -> int:
        """Return the bytes of a task's weights, without a merged copy."""
        return self._sizes.get(number, 0)

    def has_factors(self, number: int) -> bool:
        """Return whether a task's weights are changes of the base's."""
        return number in self._thin

    def merged_bytes(self, number: int) -> int:
        """Return the bytes of a task's merged copy; 0 for none."""
        return self._copies.get(number, 0)

    def use(self, numbers: Sequence[int]) -> None:
        """Count tasks as used by one call. Inside `turn`."""
        present = [n for n in numbers if n in self.held]  # others were removed since the call began
        self._admit(present)
        if self.room is not None:
            self._fit()
            self._hot.use(n for n in present if n in self._thin)

    def merge_hot(self, numbers: Sequence[int]) -> None:
        """Make a merged copy for one of these tasks, if one of them is used often and there is room. Outside `turn`."""
        if self.room is None or not any(n in self._thin for n in numbers):
            return
        with self._lock:
            called = [n for n in numbers if n in self._thin]
            size = max((merged_size(self.held[n]) for n in called), default=0)
            number, colder = self._hot.choose(called, self._copies.keys(), self._free() // size if size else 0)
            if number is None:
                return
            weights = self.held[number]
        # takes as long as a few calls' products: others may call meanwhile
        copy: Weights = tuple(dict(part) for part in merge(weights))
        with self._lock:
            if self.held.get(number) is not weights or number in self._copies:
                return
            self._unmerge(() if colder is None else (colder,))
            if merged_size(weights) <= self._free() - sum(self._copies.values()):
                self.merged = {**self.merged, number: copy}
                self._copies[number] = merged_size(weights)

    def set_room(self, room: int | None) -> None:
        """Change how many bytes count as present."""
        self.room = room
        if room is None:
            self._admit([n for n in self.held if n not in self.residency])
        else:
            self._left(self.residency.shrink(room))
            self._fit()

    def device_bytes(self) -> int:
        """Return the bytes of the tasks that count as present, and of merged copies."""
        return self.residency.size + sum(self._copies.values())

    def host_bytes(self) -> int:
        """Return 0: there is no second copy."""
        return 0

    def _admit(self, numbers: Sequence[int]) -> None:
        change = self.residency.admit(numbers, self.room, {n: self._sizes[n] for n in numbers})
        self._absent -= sum(self._thin.get(n, 0) for n in change.enter)
        self._left(change.leave)

    def _left(self, numbers: Sequence[int]) -> None:
        """Count factors as absent."""
        self._absent += sum(self._thin.get(n, 0) for n in numbers)

    def _free(self) -> int:
        """Return the bytes that all factors and the whole weights of called tasks leave."""
        return 0 if self.room is None else self.room - self.residency.size - self._absent

    def _fit(self) -> None:
        """Drop the merged copies of the least used tasks that no longer fit."""
        while self._copies and sum(self._copies.values()) > self._free():
            self._unmerge((min(self._copies, key=self._hot.score),))

    def _unmerge(self, numbers: Sequence[int]) -> None:
        if any(n in self._copies for n in numbers):
            self.merged = {n: w for n, w in self.merged.items() if n not in numbers}
            for number in numbers:
                self._copies.pop(number, None)


def is_thin(weights: Weights) -> bool:
    """Return whether a task's weights are changes of the base's matrices."""
    return any(isinstance(t, LowRankMatrix) for part in weights for t in part.values())


def merged_size(weights: Weights) -> int:
    """Return the bytes of all changed matrices, merged."""
    return sum(t.base.nbytes for part in weights for t in part.values() if isinstance(t, LowRankMatrix))
