"""Stores of the tasks' attention weights: the interface, and the store for a CPU, which keeps tasks apart.

On a CPU a loop is as fast as a grouped product, tasks keep their own tensors, and calls run concurrently.
"""

import abc
import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from vtk.bank.folded import Weights, weights_bytes
from vtk.bank.residency import Residency


class Store(abc.ABC):
    """Attention weights by number.

    Attributes:
        unit: bytes of one task's.
        limit: most tasks on the device; None for all.
    """

    def __init__(self) -> None:
        self.unit = 0
        self.limit: int | None = None
        self.residency = Residency()

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
    def device_bytes(self) -> int:
        """Return the bytes on the device."""

    @abc.abstractmethod
    def host_bytes(self) -> int:
        """Return the bytes of copies on the host for paging."""

    def set_limit(self, limit: int | None) -> None:
        """Change how many are on the device. Inside `turn`."""
        self.limit = limit


class HeldStore(Store):
    """Each task's own tensors in host memory; a limit is tracked, not enforced.

    Attributes:
        held: weights by number; replaced, never changed, so that a call may keep the mapping it began with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: Mapping[int, Weights] = {}
        self._lock = threading.RLock()

    def put(self, number: int, weights: Weights) -> None:
        """Keep the weights."""
        self.held = {**self.held, number: weights}
        self.unit = weights_bytes(weights)
        if self.limit is None:
            self.residency.admit((number,), None)

    def drop(self, number: int) -> None:
        """Forget the weights; a call that uses them keeps them until it is done."""
        self.held = {n: w for n, w in self.held.items() if n != number}
        self.residency.forget(number)

    def turn(self) -> contextlib.AbstractContextManager[Any]:
        """Guard the account."""
        return self._lock

    def use(self, numbers: Sequence[int]) -> None:
        """Count tasks as used by one call. Inside `turn`."""
        self.residency.admit(numbers, self.limit)
        for number in numbers:
            if number not in self.held:  # removed since the call began
                self.residency.forget(number)

    def set_limit(self, limit: int | None) -> None:
        """Change how many count as present."""
        super().set_limit(limit)
        if limit is not None:
            self.residency.shrink(limit)

    def device_bytes(self) -> int:
        """Return the bytes of the tasks that count as present."""
        return len(self.residency) * self.unit

    def host_bytes(self) -> int:
        """Return 0: there is no second copy."""
        return 0
